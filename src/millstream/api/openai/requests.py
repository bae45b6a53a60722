"""Turns a JSON body into the plain request that the service takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from millstream.api.body import validated
from millstream.api.openai.params import IGNORED, IGNORED_STREAM_OPTIONS, UNSUPPORTED
from millstream.api.openai.schema import ChatRequest, CompletionRequest, StreamOptions, TextRequest
from millstream.api.openai.thinking import template_flags, thinking_of
from millstream.api.openai.tools import Choice, ToolSet, tool_use
from millstream.api.params import log_ignored, split_parameters
from millstream.errors import BadRequest, UnsupportedParameter
from millstream.types import ChatPrompt, GenerationRequest, Prompt, TextPrompt, ToolUse

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions, if the model has none. Chat completions have none: the model ends them."""

_Request = TypeVar("_Request", bound=TextRequest)


def parse(model: type[_Request], body: dict[str, object]) -> _Request:
    if type(body.get("best_of")) is int and body.get("best_of") == body.get("n", 1):
        body = body | {"best_of": None}  # equal to n: nothing to choose from
    values, ignored = split_parameters(body, model.model_fields, UNSUPPORTED, IGNORED)
    options = values.get("stream_options")
    if isinstance(options, dict):
        values["stream_options"], more = split_parameters(
            options, StreamOptions.model_fields, {}, IGNORED_STREAM_OPTIONS, prefix="stream_options."
        )
        ignored += more
    parsed = validated(model, values)
    log_ignored(ignored)
    return parsed


def chat_request(body: dict[str, object]) -> tuple[ChatRequest, GenerationRequest]:
    parsed = parse(ChatRequest, body)
    return parsed, chat_generation(parsed)


def completion_request(body: dict[str, object]) -> tuple[CompletionRequest, GenerationRequest]:
    parsed = parse(CompletionRequest, body)
    return parsed, completion_generation(parsed)


def chat_generation(request: ChatRequest) -> GenerationRequest:
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    _check_continuation(request)
    options = request.reasoning_options()
    kwargs = template_flags(options) | request.chat_template_kwargs
    prompt = ChatPrompt(request.messages, kwargs, request.continue_final_message)
    fields = _fields(request, (prompt,), request.top_logprobs if request.logprobs else None)
    tools = _tools(request)
    return GenerationRequest(**fields, tools=tools, thinking=thinking_of(options))


def _tools(request: ChatRequest) -> ToolUse | None:
    tools, functions = request.tools or ToolSet(), request.functions or ToolSet()
    if tools.tools and functions.tools:
        raise BadRequest("functions and tools cannot be combined. Send tools.", param="functions")
    older = request.tool_choice is None and request.function_call is not None
    choice = request.tool_choice or request.function_call or Choice()
    param = "function_call" if older else "tool_choice"
    if functions.tools:
        return tool_use(functions, choice, parallel=False, param=param)  # the older form has room for one call
    return tool_use(tools, choice, request.parallel_tool_calls, param=param)


def _check_continuation(request: ChatRequest) -> None:
    last = request.messages[-1]
    if request.continue_final_message and (last["role"] != "assistant" or "tool_calls" in last):
        raise BadRequest(
            "continue_final_message needs a last message of the assistant, without tool calls.",
            param="continue_final_message",
        )
    if not request.add_generation_prompt and not request.continue_final_message:
        raise UnsupportedParameter(
            "add_generation_prompt can be false only together with continue_final_message.",
            param="add_generation_prompt",
        )


def completion_generation(request: CompletionRequest) -> GenerationRequest:
    if request.limit() == 0 and not request.echo and request.prompt_logprobs is None:
        raise BadRequest("max_tokens must be at least 1, unless echo or prompt_logprobs is set.", param="max_tokens")
    best_of = request.best_of
    if best_of is not None and best_of < request.n:
        raise BadRequest(f"best_of ({best_of}) must be at least n ({request.n}).", param="best_of")
    if best_of is not None and request.stream:
        raise BadRequest("best_of cannot be streamed: the best completions are known only at the end.", param="best_of")
    fields = _fields(request, _prompts(request), request.logprobs)
    return GenerationRequest(**fields, echo=request.echo, best_of=best_of, default_max_tokens=COMPLETION_MAX_TOKENS)


def _prompts(request: CompletionRequest) -> tuple[Prompt, ...]:
    if not request.suffix:
        return request.prompt
    if request.echo:
        raise BadRequest("suffix cannot be combined with echo.", param="suffix")
    prompts = [prompt for prompt in request.prompt if isinstance(prompt, TextPrompt)]
    if len(prompts) < len(request.prompt):
        raise BadRequest("suffix needs a prompt that is text, not token ids.", param="suffix")
    return tuple(replace(prompt, suffix=request.suffix) for prompt in prompts)


def _fields(request: TextRequest, prompts: tuple[Prompt, ...], logprobs: int | None) -> dict[str, Any]:
    """What chats and completions have in common, as fields of a `GenerationRequest`."""
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequest("prompt_logprobs cannot be combined with stream.", param="prompt_logprobs")
    return request.generation_fields() | {
        "model": request.model,
        "prompts": prompts,
        "n": request.n,
        "logprobs": logprobs,
        "grammar": request.output_grammar(),
        "prompt_logprobs": request.prompt_logprobs,
    }
