"""Renders chat completions: a JSON object, or chunks as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from millstream.api.openai.chunk import FINISH, Frame, failure_event, finite, prompt_fields
from millstream.api.openai.render_calls import CallRenderer, ToolCalls
from millstream.api.render import joined_calls, merged, per_choice
from millstream.api.sse import EVENT_STREAM
from millstream.errors import MillstreamError
from millstream.types import Delta, FinishReason, TextLogprob, Usage

_CHUNK = "chat.completion.chunk"
_WHOLE = "chat.completion"


class ChatRenderer:
    stream_format = EVENT_STREAM

    def __init__(
        self,
        model: str,
        *,
        include_usage: bool,
        logprobs: bool,
        include_reasoning: bool = True,
        calls: CallRenderer | None = None,
    ) -> None:
        """`calls`: how tool calls are rendered. Default: as calls of functions."""
        self._include_reasoning = include_reasoning
        self._calls = calls or ToolCalls()
        self._frame = Frame("chatcmpl-", model, include_usage=include_usage)
        self._logprobs = logprobs
        self._head = self._frame.head(_CHUNK)
        self._tail = self._frame.tail()
        self._plain = b'},"logprobs":null,"finish_reason":null' + self._tail
        self._begun: dict[int, bytes] = {}
        """Choices that have begun, each with a chunk of text up to the text."""

    def opening(self, usage: Usage) -> bytes:
        return b""

    def chunks(self, batch: Sequence[Delta]) -> bytes:
        if len(batch) == 1 and (only := batch[0]).only_text and (head := self._begun.get(only.index)) is not None:
            return head + orjson.dumps(only.text) + self._plain
        parts: list[bytes] = []
        for delta in merged(batch):
            self._add(delta, parts)
        return b"".join(parts)

    def _add(self, delta: Delta, parts: list[bytes]) -> None:
        index = b"%d" % delta.index
        if delta.index not in self._begun:
            self._begun[delta.index] = self._head + index + b',"delta":{"content":'
            parts += (self._head, index, b',"delta":{"role":"assistant","content":""', self._plain)
        if delta.reasoning and self._include_reasoning:
            reasoning = orjson.dumps(delta.reasoning)
            parts += (self._head, index, b',"delta":{"reasoning_content":', reasoning, self._plain)
        if delta.logprobs and self._logprobs:
            logprobs = orjson.dumps(_logprobs(delta.logprobs))
            parts += (self._head, index, b',"delta":{"content":', orjson.dumps(delta.text))
            parts += (b'},"logprobs":', logprobs, b',"finish_reason":null', self._tail)
        elif delta.text:
            parts += (self._head, index, b',"delta":{"content":', orjson.dumps(delta.text), self._plain)
        ended = delta.finish_reason is not None
        if delta.calls or ended:
            for piece in self._calls.deltas(delta.index, joined_calls(delta.calls), ended=ended):
                parts += (self._head, index, b',"delta":', orjson.dumps(piece)[:-1], self._plain)
        if delta.finish_reason is not None:
            reason = orjson.dumps(self._finish(delta.finish_reason))
            parts += (self._head, index, b',"delta":{},"logprobs":null,"finish_reason":', reason, self._tail)

    def ending(self, usage: Usage) -> bytes:
        return self._frame.ending(_CHUNK, usage)

    def failure(self, error: MillstreamError) -> bytes:
        return failure_event(error)

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        choices = per_choice(deltas)
        more = {"prompt_logprobs": prompt_fields(choices[0].prompt)} if choices[0].prompt else {}
        return self._frame.whole(_WHOLE, [self._choice(choice) for choice in choices], usage, more)

    def _choice(self, choice: Delta) -> dict[str, object]:
        return {
            "index": choice.index,
            "message": self._message(choice),
            "logprobs": _logprobs(choice.logprobs) if self._logprobs else None,
            "finish_reason": self._finish(choice.finish_reason) if choice.finish_reason else None,
        }

    def _message(self, choice: Delta) -> dict[str, object]:
        calls = [call for call in choice.calls if not call.void]
        content = None if calls and not choice.text else choice.text
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning and self._include_reasoning:
            message["reasoning_content"] = choice.reasoning
        return message | (self._calls.message(calls) if calls else {})

    def _finish(self, reason: FinishReason) -> str:
        return self._calls.finish if reason is FinishReason.TOOL_CALLS else FINISH[reason]


def _logprobs(tokens: Sequence[TextLogprob]) -> dict[str, object]:
    content = [
        _token(token.text, token.data, token.logprob) | {"top_logprobs": [_token(*other) for other in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(text: str, data: bytes, logprob: float | None) -> dict[str, object]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(data)}
