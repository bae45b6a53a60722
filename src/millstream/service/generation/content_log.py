"""Prompts and answers in the log, for a server that was started with `--log-content`. Shortened, and without media."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from millstream.types import ChatPrompt, Delta, Prompt, TextPrompt

log = logging.getLogger(__name__)

MAX_CHARACTERS = 2000
"""Of a prompt, its end; of an answer, its beginning."""


def log_prompts(request_id: str, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        _log(request_id, "prompt", _prompt_text(prompt))


class Answer:
    """Collects the answer to one request."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            text = self._texts.get(delta.index, "")
            if len(text) <= MAX_CHARACTERS:
                calls = "".join(call.name + call.arguments for call in delta.calls)
                self._texts[delta.index] = text + delta.reasoning + delta.text + calls

    def log(self, request_id: str) -> None:
        for text in self._texts.values():
            _log(request_id, "answer", text[:MAX_CHARACTERS] + ("…" if len(text) > MAX_CHARACTERS else ""))


def _log(request_id: str, what: str, text: str) -> None:
    fields = {"event": what, "request_id": request_id, "content": text}
    log.info("%s %s: %s", request_id, what, repr(text)[1:-1], extra={"fields": fields})


def _prompt_text(prompt: Prompt) -> str:
    if isinstance(prompt, TextPrompt):
        return _end(prompt.text)
    if not isinstance(prompt, ChatPrompt):
        return f"{len(prompt.tokens)} tokens"
    parts: list[str] = []
    length = 0
    for message in reversed(prompt.messages):
        text = f"{message.get('role')}: {_end(_content(message.get('content')))}"
        parts.append(text)
        length += len(text)
        if length > MAX_CHARACTERS:
            break
    return _end("\n".join(reversed(parts)))


def _content(content: object) -> str:
    if isinstance(content, list):
        return " ".join(map(_part, content))
    return content if isinstance(content, str) else ""


def _part(part: object) -> str:
    if not isinstance(part, Mapping):
        return ""
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part.get('type')}]"


def _end(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"…{text[-MAX_CHARACTERS:]}"
