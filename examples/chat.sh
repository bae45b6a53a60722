#!/usr/bin/env bash
# A streamed chat with curl alone. Each event is a line `data: {...}`; the last one is `data: [DONE]`.
set -euo pipefail

curl --no-buffer --fail-with-body --silent --show-error \
  "${MILLSTREAM_URL:-http://127.0.0.1:8000}/v1/chat/completions" \
  -H "authorization: Bearer ${MILLSTREAM_API_KEY:-none}" \
  -H 'content-type: application/json' \
  -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "stream": true}'
