"""What the text endpoints answer, whole and as chunks of a stream, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from millstream.api.response_schema import ABSENT, ResponseSchema

Finish = Literal["stop", "length", "tool_calls"]


class CachedTokens(ResponseSchema):
    cached_tokens: int
    """Tokens of the prompt that were found in the prefix cache."""


class ReasoningTokens(ResponseSchema):
    reasoning_tokens: int
    """Tokens that the model wrote before its answer, as reasoning."""


class Usage(ResponseSchema):
    """Tokens of all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class _Frame(ResponseSchema):
    """The fields around the choices."""

    id: str
    """The same in all chunks of a stream."""
    created: int
    """Seconds since 1970."""
    model: str
    """The model that answered."""
    system_fingerprint: str
    """The version of the server."""


class PromptLogprob(ResponseSchema):
    logprob: float
    rank: int
    """1 for the likeliest token at its place."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, by token id: the token itself first, then the likeliest. Null for the first."""


class TopLogprob(ResponseSchema):
    token: str
    logprob: float
    """-9999 stands for minus infinity."""
    bytes: list[int]
    """The token as UTF-8: a token may be a part of a character."""


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]
    """The likeliest tokens at this place, as many as asked for."""


class ChatLogprobs(ResponseSchema):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(ResponseSchema):
    name: str
    arguments: str
    """A JSON object, as text."""


class ToolCall(ResponseSchema):
    id: str
    """What the message with the function's result names in tool_call_id."""
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ResponseSchema):
    role: Literal["assistant"]
    content: str | None
    """Null if there are only calls of tools."""
    refusal: None
    reasoning_content: str = ABSENT
    """What the model wrote before its answer, if it reasons."""
    tool_calls: list[ToolCall] = ABSENT


class ChatChoice(ResponseSchema):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    """Null unless logprobs were asked for."""
    finish_reason: Finish
    """stop: the model ended it, or a stop string. length: the token limit. tool_calls: the model calls tools."""


class ChatCompletion(_Frame):
    """The answer to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = ABSENT
    """If prompt_logprobs was set. For each token of the prompt, by token id: the token itself first, then the
    likeliest. Null for the first token."""


class FunctionPiece(ResponseSchema):
    name: str = ABSENT
    arguments: str


class ToolCallPiece(ResponseSchema):
    """The first piece of a call has an id, a type and a name; those that follow are more of its arguments."""

    index: int
    """Which call of the answer this belongs to."""
    id: str = ABSENT
    type: Literal["function"] = ABSENT
    function: FunctionPiece


class ChatDelta(ResponseSchema):
    """What is new. Empty in the last chunk of a choice."""

    role: Literal["assistant"] = ABSENT
    content: str = ABSENT
    reasoning_content: str = ABSENT
    tool_calls: list[ToolCallPiece] = ABSENT


class ChatChunkChoice(ResponseSchema):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    """Null in all but the last chunk of a choice."""


class ChatCompletionChunk(_Frame):
    """A piece of a streamed answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    """One choice; none in the chunk that counts the tokens."""
    usage: Usage | None = ABSENT
    """With stream_options.include_usage: null in all chunks but the last, which has no choices."""


class CompletionLogprobs(ResponseSchema):
    """Parallel lists, one item a token."""

    tokens: list[str]
    """A token that is a part of a character is written as its bytes, such as `bytes:\\xf0\\x9f`."""
    token_logprobs: list[float | None]
    """Null for the first token of a prompt (echo)."""
    top_logprobs: list[dict[str, float] | None] | None
    """The likeliest tokens at each place; null if none were asked for."""
    text_offset: list[int]
    """Where the token begins in the text, in characters."""


class CompletionChoice(ResponseSchema):
    index: int
    """Choices of the first prompt come first."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    """stop: the model ended it, or a stop string. length: the token limit."""
    prompt_logprobs: PromptLogprobs = ABSENT
    """If prompt_logprobs was set. For each token of the prompt, by token id: the token itself first, then the
    likeliest. Null for the first token."""


class Completion(_Frame):
    """The continuation of a text, or of several."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(ResponseSchema):
    index: int
    text: str
    """What is new."""
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    """Null in all but the last chunk of a choice."""


class CompletionChunk(_Frame):
    """A piece of a streamed continuation."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    """One choice; none in the chunk that counts the tokens."""
    usage: Usage | None = ABSENT
    """With stream_options.include_usage: null in all chunks but the last, which has no choices."""
