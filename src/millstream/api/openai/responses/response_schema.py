"""Response models of the Responses API, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from millstream.api.openai.responses.items_out import JsonItem
from millstream.api.response_schema import ABSENT, ResponseSchema

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputTokensDetails(ResponseSchema):
    cached_tokens: int
    """Tokens of the input that were found in the prefix cache."""
    cache_write_tokens: int
    """Always 0: writing to the prefix cache costs nothing here."""


class OutputTokensDetails(ResponseSchema):
    reasoning_tokens: int


class ResponseUsage(ResponseSchema):
    """Token counts over all answers of the model within the response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(ResponseSchema):
    code: str
    """context_length_exceeded, invalid_prompt, invalid_image, rate_limit_exceeded or server_error."""
    message: str


class IncompleteDetails(ResponseSchema):
    reason: Literal["max_output_tokens"]


class ReasoningText(ResponseSchema):
    type: Literal["reasoning_text"]
    text: str


class ReasoningOutput(ResponseSchema):
    """The model's reasoning."""

    id: str
    type: Literal["reasoning"]
    summary: list[JsonItem]
    """With reasoning.summary: the reasoning itself."""
    content: list[ReasoningText]
    encrypted_content: str | None
    """With include: the reasoning in a form that only this server can read. Send the item back to restore it."""
    status: ItemStatus


class OutputText(ResponseSchema):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    """Always empty."""
    logprobs: list[JsonItem]


class MessageOutput(ResponseSchema):
    """A message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class FunctionCallOutput(ResponseSchema):
    """A call of a function, which the client runs."""

    id: str
    type: Literal["function_call"]
    call_id: str
    """Send it as call_id in the function_call_output."""
    name: str
    namespace: str = ABSENT
    arguments: str
    """A JSON object, as text."""
    status: ItemStatus


class CustomToolCallOutput(ResponseSchema):
    """A call of a custom tool, which the client runs."""

    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str = ABSENT
    input: str


class McpListTools(ResponseSchema):
    """The tools of an MCP server."""

    id: str
    type: Literal["mcp_list_tools"]
    server_label: str
    tools: list[JsonItem]


class McpCall(ResponseSchema):
    """A call of an MCP server, which this server has run."""

    id: str
    type: Literal["mcp_call"]
    server_label: str
    name: str
    arguments: str
    approval_request_id: str | None
    output: str | None
    error: JsonItem | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]


class McpApprovalRequest(ResponseSchema):
    """A call of an MCP server that is run once the client approves it."""

    id: str
    type: Literal["mcp_approval_request"]
    server_label: str
    name: str
    arguments: str


OutputItems = (
    ReasoningOutput
    | MessageOutput
    | FunctionCallOutput
    | CustomToolCallOutput
    | McpListTools
    | McpCall
    | McpApprovalRequest
)


class ResponseObject(ResponseSchema):
    """A response. Most fields repeat what was requested."""

    id: str
    object: Literal["response"]
    created_at: int
    """Seconds since 1970."""
    completed_at: int | None
    status: Status
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    """The model that generated the output."""
    output: list[OutputItems]
    """In the order in which the model wrote them."""
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: JsonItem
    safety_identifier: str | None
    service_tier: str
    temperature: float
    text: JsonItem
    tool_choice: Any
    tools: list[JsonItem]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    """Null until the response has ended."""
    user: str | None
    access_programs: None
    conversation: None
    image: None
    moderation: None
    prompt: None
    prompt_cache_diagnostics: None
    prompt_cache_options: None
    prompt_cache_retention: None
    tool_usage: None


class ResponseEvent(ResponseSchema):
    """An event of a stream. Besides these fields, each type has its own, as in OpenAI's API."""

    type: str
    """Such as response.output_text.delta."""
    sequence_number: int
    """Counts the events of a response from 0."""


class InputItemList(ResponseSchema):
    """A page of input items."""

    object: Literal["list"]
    data: list[JsonItem]
    first_id: str
    last_id: str
    has_more: bool


class InputTokens(ResponseSchema):
    """The number of tokens of an input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(ResponseSchema):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


MODELS = (ResponseObject, ResponseEvent, InputItemList, InputTokens, DeletedResponse)
