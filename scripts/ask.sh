#!/usr/bin/env bash
# Starts a server on the demo model, asks it one question with curl, prints the streamed answer, and stops it.
#
#   scripts/ask.sh millstream                       # or: python -m millstream
#   SERVE="make serve ARGS='--port 0'" scripts/ask.sh
#
# Ends with 0 if the answer was right.
# PATIENCE: seconds that the start may take, with all downloads (default 900).
# PAGE_PYTHON: a Python with Playwright, which asks in the page, too.
set -euo pipefail

log=$(mktemp)
server=
stop() {
  if [ -n "$server" ] && kill -0 "$server" 2> /dev/null; then
    kill -TERM -- "-$server" 2> /dev/null || kill -TERM "$server"
    wait "$server" || true
  fi
  rm -f "$log"
}
trap stop EXIT

set -m # the server gets a process group of its own, so that all of it can be stopped
if [ $# -gt 0 ]; then
  "$@" serve --port 0 > "$log" 2>&1 &
else
  bash -c "exec ${SERVE:?name the command}" > "$log" 2>&1 &
fi
server=$!
set +m

url=
for ((second = 0; second < ${PATIENCE:-900}; second++)); do
  url=$(sed -nE 's#.*ready: .*API: (http://[^/]*)/v1.*#\1#p' "$log" | head -n 1)
  [ -n "$url" ] && break
  kill -0 "$server" 2> /dev/null || break
  sleep 1
done
if [ -z "$url" ]; then
  echo "The server did not become ready. Its output:" >&2
  cat "$log" >&2
  exit 1
fi
echo "The server is ready at $url"

echo "Question: What is the capital of France?"
answer=$(
  curl --no-buffer --fail-with-body --silent --show-error "$url/v1/chat/completions" \
    -H 'content-type: application/json' \
    -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "stream": true}' |
    sed -nE 's/^data: .*"content":"([^"]*)".*/\1/p' | tr -d '\n'
)
echo "Answer:   $answer"
case "$answer" in
  *Paris*) ;;
  *) echo "That was not the right answer." >&2 && exit 1 ;;
esac

if curl --fail --silent -H 'accept: text/html' "$url/" | grep -qi '<html'; then
  echo "The page is at $url/"
  if [ -n "${PAGE_PYTHON:-}" ]; then
    "$PAGE_PYTHON" "$(dirname "${BASH_SOURCE[0]}")/ask_page.py" "$url"
  fi
fi
