"""Response models of the text endpoints, whole and as chunks of a stream, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from millstream.api.response_schema import ABSENT, ResponseSchema

Finish = Literal["stop", "length", "tool_calls", "function_call"]


class CachedTokens(ResponseSchema):
    cached_tokens: int
    """Tokens of the prompt that were found in the prefix cache."""


class CompletionTokens(ResponseSchema):
    reasoning_tokens: int
    """Tokens of the model's reasoning."""
    accepted_prediction_tokens: int
    """Tokens that a draft had right, whatever made it: the request's prediction, or speculative decoding."""
    rejected_prediction_tokens: int
    """Tokens of drafts that were wrong. They are not in completion_tokens."""


class Usage(ResponseSchema):
    """Token counts over all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens


class _Frame(ResponseSchema):
    """The fields around the choices."""

    id: str
    """The same in all chunks of a stream."""
    created: int
    """Seconds since 1970."""
    model: str
    """The model that generated the text."""
    system_fingerprint: str
    """The version of the server."""


class PromptLogprob(ResponseSchema):
    logprob: float
    rank: int
    """1 for the most likely token at its position."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, by token id: the token itself, then the most likely ones. Null for the first."""


class TopLogprob(ResponseSchema):
    token: str
    logprob: float
    """-9999 stands for minus infinity."""
    bytes: list[int]
    """The bytes of the token in UTF-8: a token may be part of a character."""


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]
    """The most likely tokens at this position, as many as requested."""


class ChatLogprobs(ResponseSchema):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(ResponseSchema):
    name: str
    arguments: str
    """A JSON object, as text."""


class ToolCall(ResponseSchema):
    id: str
    """Send it as tool_call_id in the message with the function's result."""
    type: Literal["function"]
    function: CalledFunction


class CustomInput(ResponseSchema):
    name: str
    input: str
    """Free text."""


class CustomToolCall(ResponseSchema):
    """A call of a custom tool."""

    id: str
    type: Literal["custom"]
    custom: CustomInput


class ChatMessage(ResponseSchema):
    role: Literal["assistant"]
    content: str | None
    """Null if there are only tool calls."""
    refusal: None
    reasoning_content: str = ABSENT
    """The model's reasoning, if any."""
    tool_calls: list[ToolCall | CustomToolCall] = ABSENT
    function_call: CalledFunction = ABSENT
    """The call, if the request has functions instead of tools."""


class ChatChoice(ResponseSchema):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    """Null unless logprobs was set."""
    finish_reason: Finish
    """stop: the end of text or a stop string. length: the token limit. tool_calls: the model calls tools.
    function_call: the same, if the request has functions instead of tools."""


class ChatCompletion(_Frame):
    """The completion of a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = ABSENT
    """Present if prompt_logprobs was set. For each token of the prompt, by token id: the token itself, then the most
    likely ones. Null for the first token."""


class FunctionPiece(ResponseSchema):
    name: str = ABSENT
    arguments: str


class ToolCallPiece(ResponseSchema):
    """The first piece of a call has an id, a type and a name. The others continue its arguments."""

    index: int
    """The number of the call in the message."""
    id: str = ABSENT
    type: Literal["function"] = ABSENT
    function: FunctionPiece


class CustomPiece(ResponseSchema):
    name: str = ABSENT
    input: str


class CustomCallPiece(ResponseSchema):
    """The first piece of a call of a custom tool has an id, a type and a name. The others continue its input."""

    index: int
    id: str = ABSENT
    type: Literal["custom"] = ABSENT
    custom: CustomPiece


class ChatDelta(ResponseSchema):
    """The new part of the message. Empty in the last chunk of a choice."""

    role: Literal["assistant"] = ABSENT
    content: str = ABSENT
    reasoning_content: str = ABSENT
    tool_calls: list[ToolCallPiece | CustomCallPiece] = ABSENT
    function_call: FunctionPiece = ABSENT


class ChatChunkChoice(ResponseSchema):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    """Null in all but the last chunk of a choice."""


class ChatCompletionChunk(_Frame):
    """A chunk of a streamed completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    """One choice; none in the chunk with the token counts."""
    usage: Usage | None = ABSENT
    """With stream_options.include_usage: null in all chunks but the last, which has no choices."""


class CompletionLogprobs(ResponseSchema):
    """Parallel lists with one item per token."""

    tokens: list[str]
    """A token that is part of a character is shown by its bytes, such as `bytes:\\xf0\\x9f`."""
    token_logprobs: list[float | None]
    """Null for the first token of a prompt (echo)."""
    top_logprobs: list[dict[str, float] | None] | None
    """The most likely tokens at each position; null if none were requested."""
    text_offset: list[int]
    """Offset of the token in the text, in characters."""


class CompletionChoice(ResponseSchema):
    index: int
    """Choices of the first prompt come first."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    """stop: the end of text or a stop string. length: the token limit."""
    prompt_logprobs: PromptLogprobs = ABSENT
    """Present if prompt_logprobs was set. For each token of the prompt, by token id: the token itself, then the most
    likely ones. Null for the first token."""


class Completion(_Frame):
    """The completions of one or more prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(ResponseSchema):
    index: int
    text: str
    """The new text."""
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    """Null in all but the last chunk of a choice."""


class CompletionChunk(_Frame):
    """A chunk of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    """One choice; none in the chunk with the token counts."""
    usage: Usage | None = ABSENT
    """With stream_options.include_usage: null in all chunks but the last, which has no choices."""
