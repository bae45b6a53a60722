"""From a JSON object to the plain request that the service takes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

from millstream.api.body import validated
from millstream.api.openai.params import UNSERVED, UNSERVED_STREAM_OPTIONS, served
from millstream.api.openai.schema import ChatRequest, CompletionRequest, StreamOptions, TextRequest
from millstream.api.openai.tools import tool_use
from millstream.errors import BadRequest
from millstream.types import ChatPrompt, GenerationRequest, Prompt, Sampling, Thinking

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions. A chat has none: it ends where the model ends it."""

_Request = TypeVar("_Request", bound=TextRequest)


def read(model: type[_Request], body: dict[str, object]) -> _Request:
    if body.get("best_of") is not None and body.get("best_of") == body.get("n", 1):
        body = body | {"best_of": None}  # as many tried as asked for: nothing to choose from
    values = served(body, model.model_fields, UNSERVED)
    options = values.get("stream_options")
    if isinstance(options, dict):
        known = StreamOptions.model_fields
        values["stream_options"] = served(options, known, UNSERVED_STREAM_OPTIONS, within="stream_options.")
    return validated(model, values)


def chat_generation(request: ChatRequest) -> GenerationRequest:
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    prompt = ChatPrompt(request.messages, request.chat_template_kwargs)
    asked = _generation(request, (prompt,), _limit(request), request.top_logprobs if request.logprobs else None)
    return replace(
        asked,
        tools=tool_use(request.tools, request.tool_choice, request.parallel_tool_calls),
        thinking=Thinking(request.reasoning_effort, request.thinking_budget),
    )


def completion_generation(request: CompletionRequest) -> GenerationRequest:
    return _generation(request, request.prompt, _limit(request) or COMPLETION_MAX_TOKENS, request.logprobs)


def _generation(
    request: TextRequest, prompts: tuple[Prompt, ...], max_tokens: int | None, logprobs: int | None
) -> GenerationRequest:
    return GenerationRequest(
        model=request.model,
        prompts=prompts,
        sampling=request.sampling(),
        seeded=request.seed is not None,
        n=request.n,
        max_tokens=max_tokens,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        unset=frozenset(name.name for name in fields(Sampling)) - request.model_fields_set,
    )


def _limit(request: TextRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadRequest(
            f"max_tokens ({old}) and max_completion_tokens ({new}) disagree; send one of them.",
            param="max_completion_tokens",
        )
    return old if new is None else new
