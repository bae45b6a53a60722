"""Requests that real clients sent: `load` for tests, and `scrub`, which makes a raw recording fit to be committed.

    python tests/support/recordings.py RAW.json tests/recorded/CLIENT.json

Scrubbing keeps every field name, type and short value. Texts that the clients' authors wrote (prompts, descriptions,
grammars) become placeholders, and so does what identifies a machine, a session or a user.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "recorded"
LONGEST = 40
"""Longer strings become placeholders, unless they are of `_WHOLE` or say something that the server acts on."""

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_PATH = re.compile(r"/(?:tmp|root|home|work)(?:/[\w.-]+)*/([\w.-]+)")
_SESSION = re.compile(r"ses_\w{10,}")
_WHOLE = (
    "data:image/",
    "iVBORw0KGgo",
    "x-anthropic-billing-header:",
    "http://json-schema.org",
    "https://json-schema.org",
)
_OURS = (
    "Read note.txt and tell me",
    "What is the weather in",
    "What colour is",
    '{"',
    "*** Begin Patch",
    "The secret word",
)
_LEFT_OUT = {"host", "content-length", "connection", "accept-encoding"}
_SECRET = {"authorization": "Bearer secret", "x-api-key": "secret"}
_OF_MACHINE = re.compile(r"x-stainless-(arch|os|runtime-version)|x-codex-turn-metadata|user-agent")
_GRAMMAR = "start: /[^\\n]+/"


def load() -> dict[str, list[dict[str, Any]]]:
    """The recorded requests by client."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def scrub(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The requests without foreign texts and traces of a machine. Equal ones are kept once."""
    clean = [
        {
            "method": request["method"],
            "path": request["path"],
            "headers": _headers(request["headers"]),
            "body": _scrubbed(request["body"], ""),
        }
        for request in requests
    ]
    return [request for place, request in enumerate(clean) if request not in clean[:place]]


def _headers(headers: dict[str, str]) -> dict[str, str]:
    clean = {}
    for name, value in headers.items():
        key = name.lower()
        if key in _LEFT_OUT:
            continue
        if key in _SECRET:
            value = _SECRET[key]
        elif _OF_MACHINE.fullmatch(key):
            value = value.split(" ")[0] if key == "user-agent" else "scrubbed"
        clean[key] = _anonymous(value)
    return clean


def _scrubbed(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _scrubbed(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_scrubbed(inner, key) for inner in value]
    return _text(_anonymous(value), key) if isinstance(value, str) else value


def _text(text: str, key: str) -> str:
    if key == "user_id" or key.startswith("x-codex"):
        return "scrubbed"
    if key == "description":
        return "A description."
    if key == "definition":
        return _GRAMMAR
    if (len(text) <= LONGEST and not text.startswith("<")) or text.startswith(_WHOLE):
        return text
    return text if len(text) <= 4 * LONGEST and text.startswith(_OURS) else f"A text of {len(text)} characters."


def _anonymous(text: str) -> str:
    text = _UUID.sub("00000000-0000-4000-8000-000000000000", text)
    return _SESSION.sub("ses_0000000000", _PATH.sub(r"/project/\1", text))


if __name__ == "__main__":
    raw, target = sys.argv[1:]
    requests = scrub(json.loads(Path(raw).read_text("utf-8")))
    Path(target).write_text(json.dumps(requests, indent=1, ensure_ascii=False) + "\n", "utf-8")
