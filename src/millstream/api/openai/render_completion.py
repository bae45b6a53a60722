"""Renders text completions: a JSON object, or chunks as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from millstream.api.openai.chunk import FINISH, Frame, failure_event, finite, prompt_fields
from millstream.api.render import merged, per_choice
from millstream.api.sse import EVENT_STREAM
from millstream.errors import MillstreamError
from millstream.types import Delta, TextLogprob, Usage

_KIND = "text_completion"


class CompletionRenderer:
    stream_format = EVENT_STREAM

    def __init__(self, model: str, *, include_usage: bool, logprobs: int | None) -> None:
        self._frame = Frame("cmpl-", model, include_usage=include_usage)
        self._logprobs = logprobs
        self._head = self._frame.head(_KIND)
        self._tail = self._frame.tail()
        self._plain = b',"logprobs":null,"finish_reason":null' + self._tail

    def opening(self, usage: Usage) -> bytes:
        return b""

    def chunks(self, batch: Sequence[Delta]) -> bytes:
        parts: list[bytes] = []
        for delta in merged(batch):
            self._add(delta, parts)
        return b"".join(parts)

    def _add(self, delta: Delta, parts: list[bytes]) -> None:
        logprobs = self._legacy(delta)
        if not (delta.text or delta.finish_reason or logprobs):
            return
        parts += (self._head, b"%d" % delta.index, b',"text":', orjson.dumps(delta.text))
        if delta.finish_reason is None and logprobs is None:
            parts.append(self._plain)
        else:
            reason = FINISH[delta.finish_reason] if delta.finish_reason else None
            parts += (b',"logprobs":', orjson.dumps(logprobs), b',"finish_reason":', orjson.dumps(reason))
            parts.append(self._tail)

    def ending(self, usage: Usage) -> bytes:
        return self._frame.ending(_KIND, usage)

    def failure(self, error: MillstreamError) -> bytes:
        return failure_event(error)

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        choices = per_choice(deltas)
        return self._frame.whole(_KIND, [self._choice(choice) for choice in choices], usage)

    def _choice(self, choice: Delta) -> dict[str, object]:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._legacy(choice),
            "finish_reason": FINISH[choice.finish_reason] if choice.finish_reason else None,
            **({"prompt_logprobs": prompt_fields(choice.prompt)} if choice.prompt else {}),
        }

    def _legacy(self, delta: Delta) -> dict[str, object] | None:
        """The legacy form: parallel lists."""
        if self._logprobs is None or not delta.logprobs:
            return None
        return {
            "tokens": [_name(token.text, token.data) for token in delta.logprobs],
            "token_logprobs": [finite(token.logprob) for token in delta.logprobs],
            "top_logprobs": [_top(token) for token in delta.logprobs] if self._logprobs else None,
            "text_offset": [token.offset for token in delta.logprobs],
        }


def _top(token: TextLogprob) -> dict[str, float | None] | None:
    if token.logprob is None:
        return None
    return {_name(text, data): finite(logprob) for text, data, logprob in token.top}


def _name(text: str, data: bytes) -> str:
    """Names a token by its text, or by its bytes if it is part of a character: tokens are keys here, and as text all
    such parts look alike."""
    return text if text.encode() == data else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
