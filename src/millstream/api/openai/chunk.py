"""What the two text dialects have in common on the wire."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import orjson

from millstream import __version__
from millstream.api.sse import DONE, event
from millstream.types import FinishReason, PromptToken, Usage

FINGERPRINT = f"millstream-{__version__}"
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; it is OpenAI's value for it."""

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
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def finite(logprob: float | None) -> float | None:
    """None for the first token of a prompt, of which nothing can be said."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def prompt_fields(prompt: Sequence[PromptToken]) -> list[dict[str, object] | None]:
    """Log-probabilities of a prompt as vLLM writes them: by token id, the token itself first."""
    return [
        {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": text}
            for token, text, logprob, rank in place.options
        }
        or None
        for place in prompt
    ]


class Frame:
    """The fields around the choices: the same in every chunk, so they are rendered once and copied from then on."""

    def __init__(self, prefix: str, model: str, *, include_usage: bool) -> None:
        self._fields = {
            "id": prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._include_usage = include_usage

    def opening(self, kind: str) -> bytes:
        """A chunk up to the index of its one choice."""
        return b"data: " + orjson.dumps({"object": kind} | self._fields)[:-1] + b',"choices":[{"index":'

    def closing(self) -> bytes:
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
