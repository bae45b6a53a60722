#!/usr/bin/env bash
# A new user's path: clone the repository, run `make serve`, and get a streamed answer, by curl and in the page.
#
#   scripts/first_steps.sh [REPOSITORY]             # default: this one
#
# PACKAGES: a site-packages folder that already has the dependencies. They are taken from there instead of downloaded.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

git clone --quiet --depth 1 "${1:-file://$here}" "$work/millstream"
cd "$work/millstream"
if [ -n "${PACKAGES:-}" ]; then
  "${PYTHON:-python3}" -m venv .venv
  echo "$PACKAGES" > "$(echo .venv/lib/python*/site-packages)/packages.pth"
fi
PAGE_PYTHON=${PYTHON:-python3} SERVE="make --no-print-directory serve ARGS='--port 0'" scripts/ask.sh
