"""Request models of OpenAI's text endpoints. Numbers are strict: neither a string nor true is a number."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.generation_fields import GenerationFields
from millstream.api.numbers import Whole
from millstream.api.openai import request_docs as docs
from millstream.api.openai.fields import parse_prompts
from millstream.api.openai.grammars import StructuredRequest
from millstream.api.openai.messages import Message, parse_messages
from millstream.api.openai.thinking import ThinkingRequest
from millstream.api.openai.tools import Choice, ToolSet, parse_choice, parse_function_call, parse_functions, parse_tools
from millstream.parameters import NO_LIMIT
from millstream.types import Prompt

Messages = Annotated[tuple[Message, ...], PlainValidator(parse_messages), WithJsonSchema(docs.MESSAGES)]
Prompts = Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts), WithJsonSchema(docs.PROMPTS)]
ToolList = Annotated[ToolSet, PlainValidator(parse_tools), WithJsonSchema(docs.TOOLS)]
ToolChoice = Annotated[Choice, PlainValidator(parse_choice), WithJsonSchema(docs.TOOL_CHOICE)]
Functions = Annotated[ToolSet, PlainValidator(parse_functions), WithJsonSchema(docs.FUNCTIONS)]
FunctionCall = Annotated[Choice, PlainValidator(parse_function_call), WithJsonSchema(docs.FUNCTION_CALL)]
Top = Annotated[Whole, Field(ge=0, le=20)]


def _switch(value: object) -> object:
    """For `logprobs`, which is a number in one API and a flag in the other: 0 switches it off."""
    return False if type(value) is int and value == 0 else value


def _number(value: object) -> object:
    return None if value is False else value


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(
        strict=True, use_attribute_docstrings=True, json_schema_extra=docs.complete_stream_options
    )

    include_usage: bool = False
    """End the stream with a chunk that has the token counts."""


class TextRequest(GenerationFields, StructuredRequest):
    """Parameters of both endpoints. An optional parameter that is null counts as not given."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=docs.complete_request)

    model: str = ""
    """The model's id or alias, as listed by /v1/models. Default: the server's first model."""
    n: Annotated[Whole, Field(ge=1, le=128)] = 1
    """Number of completions per prompt."""
    stream: bool = False
    """Send the completion as server-sent events while it is generated."""
    stream_options: StreamOptions = StreamOptions()
    """Options of a stream. They have no effect without stream."""
    prompt_logprobs: Top | None = None
    """Return the log-probability of each token of the prompt, and this many top tokens. Not with stream."""


class ChatRequest(TextRequest, ThinkingRequest):
    """A conversation to continue."""

    messages: Messages
    """The conversation so far: system, developer, user, assistant and tool messages."""
    logprobs: Annotated[bool, BeforeValidator(_switch), WithJsonSchema(docs.SWITCH)] = False
    """Return the log-probability of each token of the completion."""
    top_logprobs: Top = 0
    """Also return this many of the most likely tokens at each position. Needs logprobs."""
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Passed to the model's chat template, for example {"enable_thinking": false}."""
    continue_final_message: bool = False
    """Continue the last message, which must be an assistant's, instead of answering it."""
    add_generation_prompt: bool = True
    """False only together with continue_final_message, which implies it."""
    tools: ToolList | None = None
    """Functions that the model may call, and custom tools, which take free text."""
    tool_choice: ToolChoice | None = None
    """none: no call. auto: the model decides. required: at least one call. Or the function that must be called, or the
    tools that may be called."""
    functions: Functions | None = None
    """The older form of tools. Calls come back in its form, too."""
    function_call: FunctionCall | None = None
    """The older form of tool_choice."""
    parallel_tool_calls: bool | None = None
    """False: at most one call per completion."""


class CompletionRequest(TextRequest):
    """A text to continue."""

    prompt: Prompts
    """The text, or its token ids; or a list of such prompts, which run in parallel."""
    suffix: str = ""
    """Text after the completion, for models that can fill in the middle."""
    logprobs: Annotated[Top | None, BeforeValidator(_number), WithJsonSchema(docs.NUMBER_OR_OFF)] = None
    """Return the log-probability of each token, and this many of the most likely tokens at each position."""
    max_tokens: Annotated[Whole, Field(ge=-1, le=NO_LIMIT)] | None = None
    """Maximum number of tokens per completion. -1: no limit but the context length. 0 needs echo or prompt_logprobs:
    only the prompt is evaluated."""
    echo: bool = False
    """Begin each completion with its prompt, and with the log-probabilities of the prompt if logprobs is set."""
    best_of: Annotated[Whole, Field(ge=1, le=128)] | None = None
    """Generate this many completions per prompt, and return the n with the highest log-probability per token. Not with
    stream."""

    def limit(self) -> int | None:
        return 0 if self.max_tokens == 0 else super().limit()
