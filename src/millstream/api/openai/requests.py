"""Turns a JSON body into the plain request that the service takes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

from millstream.api.body import validated
from millstream.api.openai.params import UNSUPPORTED, UNSUPPORTED_STREAM_OPTIONS, supported
from millstream.api.openai.schema import ChatRequest, CompletionRequest, StreamOptions, TextRequest
from millstream.api.openai.tools import tool_use
from millstream.errors import BadRequest
from millstream.types import ChatPrompt, GenerationRequest, Grammar, Prompt, Sampling, Thinking

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions. Chat completions have none: the model ends them."""

_Request = TypeVar("_Request", bound=TextRequest)


def parse(model: type[_Request], body: dict[str, object]) -> _Request:
    if type(body.get("best_of")) is int and body.get("best_of") == body.get("n", 1):
        body = body | {"best_of": None}  # equal to n: nothing to choose from
    values = supported(body, model.model_fields, UNSUPPORTED)
    options = values.get("stream_options")
    if isinstance(options, dict):
        known = StreamOptions.model_fields
        values["stream_options"] = supported(options, known, UNSUPPORTED_STREAM_OPTIONS, prefix="stream_options.")
    return validated(model, values)


def chat_request(body: dict[str, object]) -> tuple[ChatRequest, GenerationRequest]:
    parsed = parse(ChatRequest, body)
    return parsed, chat_generation(parsed)


def completion_request(body: dict[str, object]) -> tuple[CompletionRequest, GenerationRequest]:
    parsed = parse(CompletionRequest, body)
    return parsed, completion_generation(parsed)


def chat_generation(request: ChatRequest) -> GenerationRequest:
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    prompt = ChatPrompt(request.messages, request.chat_template_kwargs)
    generation = _generation(request, (prompt,), _limit(request), request.top_logprobs if request.logprobs else None)
    return replace(
        generation,
        tools=tool_use(request.tools, request.tool_choice, request.parallel_tool_calls),
        thinking=Thinking(request.reasoning_effort, request.thinking_budget),
    )


def completion_generation(request: CompletionRequest) -> GenerationRequest:
    limit = _limit(request)
    if limit == 0 and not request.echo and request.prompt_logprobs is None:
        raise BadRequest("max_tokens must be at least 1, unless echo or prompt_logprobs is set.", param="max_tokens")
    best_of = request.best_of
    if best_of is not None and best_of < request.n:
        raise BadRequest(f"best_of ({best_of}) must be at least n ({request.n}).", param="best_of")
    if best_of is not None and request.stream:
        raise BadRequest("best_of cannot be streamed: the best completions are known only at the end.", param="best_of")
    limit = COMPLETION_MAX_TOKENS if limit is None else limit
    generation = _generation(request, request.prompt, limit, request.logprobs)
    return replace(generation, echo=request.echo, best_of=best_of)


def _generation(
    request: TextRequest, prompts: tuple[Prompt, ...], max_tokens: int | None, logprobs: int | None
) -> GenerationRequest:
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequest("prompt_logprobs cannot be combined with stream.", param="prompt_logprobs")
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
        grammar=_grammar(request),
        prompt_logprobs=request.prompt_logprobs,
        unset=frozenset(field.name for field in fields(Sampling)) - request.model_fields_set,
    )


def _grammar(request: TextRequest) -> Grammar | None:
    grammar = request.output_grammar()
    if grammar is not None and request.ignore_eos:
        raise BadRequest("ignore_eos cannot be combined with structured output.", param="ignore_eos")
    return grammar


def _limit(request: TextRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadRequest(
            f"max_tokens ({old}) and max_completion_tokens ({new}) disagree; send one of them.",
            param="max_completion_tokens",
        )
    return old if new is None else new
