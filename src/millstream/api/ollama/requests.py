"""Turns a JSON body into the plain request that the service takes."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel

from millstream.api.body import validated
from millstream.api.ollama.options import OllamaOptions, parse_options
from millstream.api.ollama.schema import (
    UNSUPPORTED,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaTextRequest,
)
from millstream.api.params import supported
from millstream.errors import BadRequest, UnsupportedParameter
from millstream.types import ChatPrompt, GenerationRequest, Prompt, TextPrompt, Thinking, ToolUse

_Model = TypeVar("_Model", bound=BaseModel)
_Named = TypeVar("_Named", bound=OllamaModelRequest)

IGNORED = ("context", "truncate", "shift", "width", "height", "steps", "insecure", "verbose", "name")
"""Fields that have no effect here. `context` is what Ollama's own server returned: this one returns none."""


def parse(model: type[_Model], body: dict[str, object]) -> _Model:
    unsupported = UNSUPPORTED if issubclass(model, OllamaTextRequest) else {}
    try:
        values = supported(body, model.model_fields, unsupported, IGNORED)
    except UnsupportedParameter as error:
        if error.param not in OllamaOptions.model_fields:
            raise
        raise UnsupportedParameter(f"{error.param} belongs into options.", param=error.param) from error
    if "options" in values and issubclass(model, OllamaTextRequest):  # none of them changes an embedding
        values["options"] = parse_options(values["options"])
    return validated(model, values)


def chat_request(body: dict[str, object]) -> OllamaChatRequest:
    return parse(OllamaChatRequest, body)


def generate_request(body: dict[str, object]) -> OllamaGenerateRequest:
    request = parse(OllamaGenerateRequest, body)
    if request.raw and request.system:
        raise BadRequest("system cannot be combined with raw: a raw prompt is not put into a template.", param="system")
    if (request.raw or request.suffix) and request.images:
        raise BadRequest("images cannot be combined with raw or suffix: they need the chat template.", param="images")
    return request


def named_request(model: type[_Named], body: dict[str, object]) -> _Named:
    """`model` is required; its old name is `name`."""
    request = parse(model, body if body.get("model") else body | {"model": body.get("name")})
    if not request.model:
        raise BadRequest("model is required.", param="model")
    return request


def chat_generation(request: OllamaChatRequest, model: str) -> GenerationRequest:
    """`model` is the name under which the model is served."""
    messages = request.messages or ()
    last = messages[-1] if messages else {}
    # Ollama continues a message that the assistant has begun.
    begun = last.get("role") == "assistant" and "tool_calls" not in last
    prompt = ChatPrompt(messages, _template_kwargs(request), continue_final=begun)
    return _generation(request, model, prompt, ToolUse(request.tools) if request.tools else None)


def prompt_generation(request: OllamaGenerateRequest, model: str) -> GenerationRequest:
    return _generation(request, model, _prompt(request), None)


def _prompt(request: OllamaGenerateRequest) -> Prompt:
    text = request.prompt or ""
    if request.suffix:
        return TextPrompt(text, request.suffix)
    if request.raw:
        return TextPrompt(text)
    user: list[dict[str, object]] = [*(request.images or ()), *([{"type": "text", "text": text}] if text else ())]
    messages: list[dict[str, object]] = [{"role": "user", "content": user if request.images else text}]
    if request.system:
        messages.insert(0, {"role": "system", "content": request.system})
    return ChatPrompt(tuple(messages), _template_kwargs(request))


def _template_kwargs(request: OllamaTextRequest) -> dict[str, object]:
    """`think: true` says that a model should reason, but not how much. These are the variables of the templates that
    can switch it on; others ignore them."""
    return {"enable_thinking": True, "thinking": True} if request.think is True else {}


def _thinking(think: bool | str | None) -> Thinking:
    if isinstance(think, str):
        return Thinking(think)
    return Thinking("none") if think is False else Thinking()


def _generation(request: OllamaTextRequest, model: str, prompt: Prompt, tools: ToolUse | None) -> GenerationRequest:
    options = request.options or OllamaOptions()
    return GenerationRequest(
        model=model,
        prompts=(prompt,),
        logprobs=request.logprob_count,
        grammar=request.format,
        tools=tools,
        thinking=_thinking(request.think),
        **options.generation_fields(),
    )
