"""Response models of Ollama's API, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from millstream.api.response_schema import ABSENT, ResponseSchema


class OllamaTokenLogprob(ResponseSchema):
    token: str
    logprob: float
    """-9999 stands for minus infinity."""
    bytes: list[int]
    """The bytes of the token in UTF-8: a token may be part of a character."""


class OllamaLogprob(OllamaTokenLogprob):
    top_logprobs: list[OllamaTokenLogprob]
    """The most likely tokens at this position, as many as requested."""


class OllamaCalledFunction(ResponseSchema):
    index: int
    name: str
    arguments: dict[str, object]


class OllamaToolCall(ResponseSchema):
    id: str
    function: OllamaCalledFunction


class OllamaMessage(ResponseSchema):
    role: Literal["assistant"]
    content: str
    thinking: str = ABSENT
    """The model's reasoning."""
    tool_calls: list[OllamaToolCall] = ABSENT


class _Line(ResponseSchema):
    model: str
    """As the request names it."""
    created_at: str
    """RFC 3339."""
    done: bool
    """True in the last line."""
    done_reason: Literal["stop", "length", "load", "unload"] = ABSENT
    total_duration: int = ABSENT
    """All durations are in nanoseconds."""
    load_duration: int = ABSENT
    """Until the model was loaded and the prompt prepared."""
    prompt_eval_count: int = ABSENT
    """Tokens of the prompt."""
    prompt_eval_duration: int = ABSENT
    """From then on until the first output."""
    eval_count: int = ABSENT
    """Tokens of the output."""
    eval_duration: int = ABSENT
    """From the first output to the last."""
    logprobs: list[OllamaLogprob] = ABSENT


class OllamaChatLine(_Line):
    """A part of the answer."""

    message: OllamaMessage


class OllamaChat(OllamaChatLine):
    """The whole answer."""


class OllamaGeneratedLine(_Line):
    """A part of the response."""

    response: str
    thinking: str = ABSENT
    """The model's reasoning."""


class OllamaGenerated(OllamaGeneratedLine):
    """The whole response."""
