"""Turns a JSON body into the plain request that the service takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from millstream.api.anthropic.messages import parse_messages, parse_system
from millstream.api.anthropic.output import AnswerOptions
from millstream.api.anthropic.request_docs import UNSUPPORTED
from millstream.api.anthropic.schema import CountRequest, MessagesRequest
from millstream.api.anthropic.thinking import output_grammar, parse_thinking, shows_thinking
from millstream.api.anthropic.tools import tool_use
from millstream.api.body import validated
from millstream.api.params import supported
from millstream.errors import BadRequest
from millstream.parameters import IGNORED
from millstream.service.ports import Seal
from millstream.types import ChatPrompt, GenerationRequest

_Request = TypeVar("_Request", bound=CountRequest)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request for a message: what to generate, and how to answer."""

    generation: GenerationRequest
    stream: bool
    options: AnswerOptions
    left_out: frozenset[str]
    """Types of tools that the model does not see."""


def messages_request(body: dict[str, object], seal: Seal) -> ParsedRequest:
    request = _parse(MessagesRequest, body)
    generation = _generation(request, seal)
    prompt = generation.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    if prompt.continue_final and "tool_calls" in prompt.messages[-1]:
        raise BadRequest("messages must not end with a call: its tool_result is missing.", param="messages")
    options = AnswerOptions(
        shows_thinking(request.thinking), _marks_cache(body), request.tools.eager, empty=request.max_tokens == 0
    )
    return ParsedRequest(generation, request.stream, options, request.tools.hosted)


def count_request(body: dict[str, object], seal: Seal) -> GenerationRequest:
    return _generation(_parse(CountRequest, body), seal)


def _parse(model: type[_Request], body: dict[str, object]) -> _Request:
    return validated(model, supported(body, model.model_fields, UNSUPPORTED, IGNORED))


def _generation(request: CountRequest, seal: Seal) -> GenerationRequest:
    messages = parse_messages(request.messages, seal)
    last = messages[-1] if messages else {}
    config = request.output_config
    return GenerationRequest(
        model=request.model,
        prompts=(
            ChatPrompt(
                (*parse_system(request.system), *messages),
                # Anthropic's API continues a message that the assistant has begun.
                continue_final=last.get("role") == "assistant",
            ),
        ),
        grammar=output_grammar(config, request.output_format),
        tools=tool_use(request.tools, request.tool_choice),
        thinking=parse_thinking(request.thinking, config),
        **(request.generation_fields() if isinstance(request, MessagesRequest) else {}),
    )


def _marks_cache(value: object) -> bool:
    """True if a `cache_control` is anywhere in the request where one can be."""
    if not isinstance(value, dict):
        return False
    if value.get("cache_control") is not None:
        return True
    places = [value.get(name) for name in ("tools", "system", "messages", "content")]
    return any(_marks_cache(item) for place in places if isinstance(place, list) for item in place)
