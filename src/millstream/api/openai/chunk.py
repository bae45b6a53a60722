"""Fields and framing that chat completions and text completions share on the wire."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import orjson

from millstream import __version__
from millstream.api.openai.errors import error_body
from millstream.api.sse import event
from millstream.errors import MillstreamError
from millstream.types import FinishReason, PromptToken, Usage

DONE = event(b"[DONE]")
FINGERPRINT = f"millstream-{__version__}"
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have. OpenAI uses the same value."""

FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "stop",
    FinishReason.TOOL_CALLS: "tool_calls",
}


def usage_fields(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            **({"skipped_tokens": usage.skipped_tokens} if usage.skipped_tokens else {}),
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def finite(logprob: float | None) -> float | None:
    """Returns None for the first token of a prompt, which has no log-probability."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def prompt_fields(prompt: Sequence[PromptToken]) -> list[dict[str, object] | None]:
    """Log-probabilities of a prompt in vLLM's form: by token id, the prompt's own token first."""
    return [
        {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": text}
            for token, text, logprob, rank in position.options
        }
        or None
        for position in prompt
    ]


def failure_event(error: MillstreamError) -> bytes:
    """No [DONE] follows: clients raise on the error field, and to others a missing [DONE] says "incomplete"."""
    return event(error_body(error))


class Frame:
    """The fields around the choices. They are the same in every chunk, so they are rendered once and then copied."""

    def __init__(self, prefix: str, model: str, *, include_usage: bool) -> None:
        self._fields = {
            "id": f"{prefix}{random.getrandbits(128):032x}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._include_usage = include_usage

    def head(self, kind: str) -> bytes:
        """A chunk up to the index of its one choice."""
        return b"data: " + orjson.dumps({"object": kind} | self._fields)[:-1] + b',"choices":[{"index":'

    def tail(self) -> bytes:
        """A chunk from the end of its choice on."""
        return b'}],"usage":null}\n\n' if self._include_usage else b"}]}\n\n"

    def ending(self, kind: str, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        last = {"object": kind} | self._fields | {"choices": [], "usage": usage_fields(usage)}
        return event(orjson.dumps(last)) + DONE

    def whole(
        self,
        kind: str,
        choices: list[dict[str, object]],
        usage: Usage,
        more: Mapping[str, object] = MappingProxyType({}),
    ) -> bytes:
        fields = {"object": kind} | self._fields | {"choices": choices, "usage": usage_fields(usage)}
        return orjson.dumps(fields | dict(more))
