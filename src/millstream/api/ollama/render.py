"""Renders chats and responses to a prompt: a JSON object, or lines of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from millstream.api.ollama.calls import CallCollector, call_fields
from millstream.api.ollama.errors import error_body
from millstream.api.ollama.timing import Stopwatch
from millstream.api.render import per_choice
from millstream.api.stream import StreamFormat
from millstream.errors import MillstreamError
from millstream.exact_json import dumps
from millstream.types import Delta, FinishReason, TextLogprob, Usage

Fields = dict[str, object]

JSON_LINES = StreamFormat(b"application/x-ndjson")
"""No pings: clients parse each line as JSON, also an empty one."""
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

_REASONS = {FinishReason.LENGTH: "length"}
"""All other reasons are `stop`, also that of tool calls."""


def rfc3339(seconds: float | None = None) -> str:
    """A time in seconds since 1970, or now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


class _LineRenderer:
    """What both endpoints share. A line holds what a delta adds: reasoning, text, and calls that are complete."""

    stream_format = JSON_LINES

    def __init__(self, model: str, *, name: str | None, watch: Stopwatch) -> None:
        """`name` is the model's name as the client wrote it: answers repeat it, as Ollama's do."""
        self._model = name or model
        self._watch = watch
        self._calls = CallCollector()
        self._reason = "stop"

    def opening(self, usage: Usage) -> bytes:
        return b""

    def chunks(self, batch: Sequence[Delta]) -> bytes:
        lines: list[bytes] = []
        for delta in batch:
            calls = self._calls.add(delta.calls)
            if delta.finish_reason is not None:
                calls += self._calls.end()
                self._reason = _REASONS.get(delta.finish_reason, "stop")
            if delta.text or delta.reasoning or delta.logprobs or calls:
                output = self._output(delta.text, delta.reasoning, calls)
                lines.append(_line(self._frame() | output | _logprobs(delta.logprobs) | {"done": False}))
        return b"".join(lines)

    def ending(self, usage: Usage) -> bytes:
        return _line(self._frame() | self._output("", "", []) | self._end(usage))

    def failure(self, error: MillstreamError) -> bytes:
        return error_body(error) + b"\n"

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        choices = per_choice(deltas)
        choice = choices[0] if choices else Delta(0)
        if choice.finish_reason is not None:
            self._reason = _REASONS.get(choice.finish_reason, "stop")
        output = self._output(choice.text, choice.reasoning, call_fields(choice.calls))
        return dumps(self._frame() | output | _logprobs(choice.logprobs) | self._end(usage))

    def loaded(self, reason: str) -> Fields:
        """The answer to a request that only loads or unloads the model."""
        end = {"done": True, "done_reason": reason, **self._watch.load_fields()}
        return self._frame() | self._output("", "", []) | end

    def _frame(self) -> Fields:
        return {"model": self._model, "created_at": rfc3339()}

    def _end(self, usage: Usage) -> Fields:
        return {"done": True, "done_reason": self._reason, **self._watch.fields(usage)}

    def _output(self, text: str, reasoning: str, calls: list[Fields]) -> Fields:
        raise NotImplementedError


class ChatLines(_LineRenderer):
    def _output(self, text: str, reasoning: str, calls: list[Fields]) -> Fields:
        message: Fields = {"role": "assistant", "content": text}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateLines(_LineRenderer):
    def _output(self, text: str, reasoning: str, calls: list[Fields]) -> Fields:
        return {"response": text, "thinking": reasoning} if reasoning else {"response": text}


def _line(fields: Fields) -> bytes:
    return dumps(fields) + b"\n"


def _logprobs(tokens: Sequence[TextLogprob]) -> Fields:
    if not tokens:
        return {}
    return {
        "logprobs": [
            _token(token.text, token.data, token.logprob) | {"top_logprobs": [_token(*other) for other in token.top]}
            for token in tokens
        ]
    }


def _token(text: str, data: bytes, logprob: float | None) -> Fields:
    return {"token": text, "logprob": max(logprob or 0.0, LEAST_LOGPROB), "bytes": list(data)}
