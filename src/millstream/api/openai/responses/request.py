"""Turns a JSON body into a plan: the parsed parameters, the new entries of the conversation, and the tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from millstream.api.body import validated
from millstream.api.openai.responses.conversation import Message
from millstream.api.openai.responses.fields import reasoning_effort, text_grammar
from millstream.api.openai.responses.ids import is_response_id
from millstream.api.openai.responses.items_in import Entry, parse_items
from millstream.api.openai.responses.request_docs import UNSUPPORTED
from millstream.api.openai.responses.schema import InputTokensRequest, PromptRequest, ResponseRequest
from millstream.api.openai.responses.tool_choice import Choice, parse_choice
from millstream.api.openai.responses.tools import Catalog, parse_tools, tools_of_items
from millstream.api.params import supported
from millstream.errors import BadRequest, PreviousResponseNotFound
from millstream.parameters import IGNORED
from millstream.service.ports import Seal
from millstream.types import ChatPrompt, GenerationRequest, Thinking, ToolUse

_Request = TypeVar("_Request", bound=PromptRequest)


@dataclass(frozen=True, slots=True)
class Plan:
    """A parsed request. `entries` are those of its own input: earlier ones come from stored responses."""

    request: PromptRequest
    entries: Sequence[Entry]
    tools: Catalog
    choice: Choice

    @property
    def previous(self) -> str | None:
        return self.request.previous_response_id

    @property
    def input(self) -> list[dict[str, Any]]:
        return self.request.input

    def generation(self, messages: tuple[Message, ...], tools: ToolUse | None) -> GenerationRequest:
        """The request to the service, for one answer of the model."""
        request = self.request
        thinking = Thinking(reasoning_effort(request.reasoning))
        grammar = text_grammar(request.text)
        if not isinstance(request, ResponseRequest):
            prompt = ChatPrompt(messages)
            return GenerationRequest(request.model, (prompt,), grammar=grammar, tools=tools, thinking=thinking)
        return GenerationRequest(
            model=request.model,
            prompts=(ChatPrompt(messages, request.chat_template_kwargs),),
            **request.generation_fields(),
            logprobs=request.logprobs,
            grammar=grammar,
            tools=tools,
            thinking=thinking,
        )


def response_plan(body: dict[str, object], seal: Seal) -> tuple[ResponseRequest, Plan]:
    request = _parse(ResponseRequest, body)
    if request.background and not request.store:
        raise BadRequest("background needs store: the response is retrieved later.", param="background")
    return request, _plan(request, seal)


def count_plan(body: dict[str, object], seal: Seal) -> Plan:
    return _plan(_parse(InputTokensRequest, body), seal)


def _parse(model: type[_Request], body: dict[str, object]) -> _Request:
    return validated(model, supported(body, model.model_fields, UNSUPPORTED, IGNORED))


def _plan(request: PromptRequest, seal: Seal) -> Plan:
    previous = request.previous_response_id
    if previous is not None and not is_response_id(previous):
        raise PreviousResponseNotFound(f"There is no stored response {previous[:64]!r}.", param="previous_response_id")
    if not request.input and previous is None:
        raise BadRequest("input is required: a string or a list of items.", param="input")
    entries = parse_items(request.input, seal)
    tools = parse_tools(request.tools, tools_of_items(request.input))
    choice = parse_choice(request.tool_choice)
    choice.check(tools)
    return Plan(request, entries, tools, choice)
