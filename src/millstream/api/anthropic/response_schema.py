"""Response models of Anthropic's routes, whole and as events of a stream, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from millstream.api.response_schema import ResponseSchema

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicOutputTokens(ResponseSchema):
    thinking_tokens: int
    """Tokens of the model's reasoning."""


class AnthropicUsage(ResponseSchema):
    """Token counts. The prompt is the sum of the three counts of input."""

    input_tokens: int
    """Tokens of the prompt that neither came from the prefix cache nor count as written to it."""
    cache_creation_input_tokens: int
    """If the request has a cache_control: tokens of the prompt that were not in the cache, and now are."""
    cache_read_input_tokens: int
    """Tokens of the prompt that came from the prefix cache."""
    output_tokens: int
    output_tokens_details: AnthropicOutputTokens


class AnthropicText(ResponseSchema):
    type: Literal["text"]
    text: str


class AnthropicThinking(ResponseSchema):
    """The model's reasoning."""

    type: Literal["thinking"]
    thinking: str
    """Empty with `"display": "omitted"`."""
    signature: str
    """The reasoning, encrypted. Send it back with the block: the server restores an empty one from it."""


class AnthropicToolUse(ResponseSchema):
    """A call. Send its result in the next user message, as a tool_result with its id."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = AnthropicText | AnthropicThinking | AnthropicToolUse


class AnthropicMessage(ResponseSchema):
    """A message of the assistant."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    """The model that wrote it."""
    content: list[Block]
    stop_reason: StopReason | None
    """end_turn: the model was done. Null in the first event of a stream only."""
    stop_sequence: str | None
    """The stop sequence that ended the message, if one did."""
    usage: AnthropicUsage


class AnthropicMessageStart(ResponseSchema):
    """The first event: the message without its content."""

    type: Literal["message_start"]
    message: AnthropicMessage


class AnthropicBlockStart(ResponseSchema):
    """Begins a block, which is empty so far."""

    type: Literal["content_block_start"]
    index: int
    content_block: Block


class AnthropicTextDelta(ResponseSchema):
    type: Literal["text_delta"]
    text: str


class AnthropicThinkingDelta(ResponseSchema):
    type: Literal["thinking_delta"]
    thinking: str


class AnthropicSignatureDelta(ResponseSchema):
    type: Literal["signature_delta"]
    signature: str


class AnthropicInputDelta(ResponseSchema):
    type: Literal["input_json_delta"]
    partial_json: str
    """The next part of the arguments, as JSON."""


class AnthropicBlockDelta(ResponseSchema):
    """The next part of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: AnthropicTextDelta | AnthropicThinkingDelta | AnthropicSignatureDelta | AnthropicInputDelta


class AnthropicBlockStop(ResponseSchema):
    type: Literal["content_block_stop"]
    index: int


class AnthropicMessageEnd(ResponseSchema):
    stop_reason: StopReason
    stop_sequence: str | None


class AnthropicMessageDelta(ResponseSchema):
    """Why the message ended, and the counts of all of it."""

    type: Literal["message_delta"]
    delta: AnthropicMessageEnd
    usage: AnthropicUsage


class AnthropicMessageStop(ResponseSchema):
    """The last event of a complete stream."""

    type: Literal["message_stop"]


class AnthropicPing(ResponseSchema):
    """Keeps an idle connection open."""

    type: Literal["ping"]


EVENTS: tuple[type[ResponseSchema], ...] = (
    AnthropicMessageStart,
    AnthropicBlockStart,
    AnthropicBlockDelta,
    AnthropicBlockStop,
    AnthropicMessageDelta,
    AnthropicMessageStop,
    AnthropicPing,
)
"""What the events of a stream hold, besides errors."""


class AnthropicTokenCount(ResponseSchema):
    """The length of a prompt."""

    input_tokens: int


class AnthropicHello(ResponseSchema):
    """A sign of life."""

    message: Literal["hello"]
