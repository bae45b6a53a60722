"""The request models of the Responses API. Numbers are strict: neither a string nor true is a number."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.generation_fields import GenerationFields
from millstream.api.numbers import Whole
from millstream.api.openai.responses import request_docs as docs
from millstream.api.openai.responses.fields import (
    parse_include,
    parse_input,
    parse_metadata,
    parse_reasoning,
    parse_text,
)
from millstream.parameters import NO_LIMIT

Input = Annotated[list[Any], PlainValidator(parse_input), WithJsonSchema(docs.INPUT)]
Text = Annotated[dict[str, Any], PlainValidator(parse_text), WithJsonSchema(docs.TEXT)]
Reasoning = Annotated[dict[str, Any], PlainValidator(parse_reasoning), WithJsonSchema(docs.REASONING)]
Include = Annotated[list[str], PlainValidator(parse_include), WithJsonSchema(docs.INCLUDE)]
Metadata = Annotated[dict[str, str], PlainValidator(parse_metadata), WithJsonSchema(docs.METADATA)]
Tools = Annotated[list[Any], WithJsonSchema(docs.TOOLS)]
ToolChoice = Annotated[Any, WithJsonSchema(docs.TOOL_CHOICE)]


class PromptRequest(BaseModel):
    """What makes the prompt. An optional parameter that is null counts as not given."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=docs.complete_request)

    model: str = ""
    """The model's id or alias, as listed by /v1/models. Default: the server's first model."""
    input: Input = Field(default_factory=list)
    """A text, or a list of items: messages, reasoning, calls and their outputs, references to stored items."""
    instructions: str | None = None
    """A system message at the beginning. It is not carried over by previous_response_id."""
    previous_response_id: str | None = None
    """The stored response that this one continues."""
    tools: Tools = Field(default_factory=list)
    """Functions, custom tools, namespaces and MCP servers. Hosted tools, such as web_search, are left out."""
    tool_choice: ToolChoice = None
    """none, auto, required, one tool, or a list of allowed tools."""
    parallel_tool_calls: bool = True
    """False: at most one call per answer of the model."""
    reasoning: Reasoning = Field(default_factory=dict)
    """`effort`: how much to reason. `summary`: show the reasoning as its summary, too."""
    text: Text = Field(default_factory=dict)
    """`format`: structured output. `verbosity` has no effect."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """auto: leave out the oldest items if the input is too long for the model. disabled: refuse the request."""


class InputTokensRequest(PromptRequest):
    """An input to count."""

    personality: str | None = None
    """Accepted; has no effect."""


class ResponseRequest(GenerationFields, PromptRequest):
    """An input to respond to."""

    background: bool = False
    """Respond at once, and generate in the background. Needs store."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the model's chat template, for example {"enable_thinking": false}."""
    include: Include = Field(default_factory=list)
    """reasoning.encrypted_content and message.output_text.logprobs have an effect; others are accepted."""
    max_tool_calls: Annotated[Whole, Field(ge=0, le=NO_LIMIT)] | None = None
    """Maximum number of calls of MCP servers."""
    metadata: Metadata = Field(default_factory=dict)
    """Up to 16 strings by name, stored with the response."""
    store: bool = True
    """Store the response, so that it can be retrieved and continued."""
    stream: bool = False
    """Send events while the response is generated."""
    stream_options: dict[str, Any] | None = None
    """Accepted; has no effect."""
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    """Return the log-probabilities of this many of the most likely tokens at each position."""
    user: str | None = None
    """Stored with the response; has no other effect."""
    safety_identifier: str | None = None
    """Stored with the response; has no other effect."""
    prompt_cache_key: str | None = None
    """Stored with the response: the prefix cache finds shared prefixes without a key."""
    prompt_cache_retention: str | None = None
    """Accepted; has no effect."""
    prompt_cache_options: dict[str, Any] | None = None
    """Accepted; has no effect."""
    service_tier: str | None = None
    """Accepted; has no effect."""
    client_metadata: dict[str, Any] | None = None
    """Accepted; has no effect."""
    context_management: list[Any] | None = None
    """Accepted; has no effect."""
    access_programs: dict[str, Any] | None = None
    """Accepted; has no effect."""

    @property
    def logprobs(self) -> int | None:
        """As `GenerationRequest.logprobs`."""
        wanted = "message.output_text.logprobs" in self.include or bool(self.top_logprobs)
        return (self.top_logprobs or 0) if wanted else None
