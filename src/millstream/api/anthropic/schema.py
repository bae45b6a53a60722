"""Request models of Anthropic's endpoints. Numbers are strict: neither a string nor true is a number."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.anthropic import request_docs as docs
from millstream.api.anthropic.tools import ToolList, parse_tools
from millstream.api.generation_fields import GenerationFields
from millstream.api.numbers import Whole
from millstream.parameters import NO_LIMIT

# The service's seal is needed to parse messages, so they are parsed later.
Messages = Annotated[object, WithJsonSchema(docs.MESSAGES)]
System = Annotated[object, WithJsonSchema(docs.SYSTEM)]
Tools = Annotated[ToolList, PlainValidator(parse_tools), WithJsonSchema(docs.TOOLS)]
ToolChoice = Annotated[object, WithJsonSchema(docs.TOOL_CHOICE)]
ThinkingConfig = Annotated[object, WithJsonSchema(docs.THINKING)]
OutputConfig = Annotated[dict[str, Any], WithJsonSchema(docs.OUTPUT_CONFIG)]
OutputFormat = Annotated[object, WithJsonSchema(docs.OUTPUT_FORMAT)]


class CountRequest(BaseModel):
    """A conversation whose tokens are counted. Parameters that are null count as not given."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=docs.complete_request)

    model: str = ""
    """The model's id or alias, as listed by /v1/models. Default: the server's first model."""
    messages: Messages
    """The conversation so far: messages with the roles user, assistant and system."""
    system: System = ""
    """The system prompt: a string, or a list of text blocks."""
    tools: Tools = Field(default_factory=ToolList)
    """Functions that the model may call. Tools that run at Anthropic only are left out."""
    tool_choice: ToolChoice = None
    """auto: the model decides. any: at least one call. tool: a call of this tool. none: no call."""
    thinking: ThinkingConfig = None
    """Whether the model reasons before it answers, and for how many tokens at most. Default: as the model does."""
    output_config: OutputConfig = Field(default_factory=dict)
    """The effort of the reasoning, and the JSON schema of structured output."""
    output_format: OutputFormat = None
    """The older name of output_config.format."""
    cache_control: object = None
    """Accepted; the prefix cache works without it."""
    context_management: object = None
    """Accepted; has no effect."""
    compaction: object = None
    """Accepted; has no effect."""
    speed: object = None
    """Accepted; has no effect."""
    betas: object = None
    """Accepted; has no effect."""
    user_profile_id: object = None
    """Accepted; has no effect."""
    workspace_id: object = None
    """Accepted; has no effect."""


class MessagesRequest(GenerationFields, CountRequest):
    """A conversation to continue with one message of the assistant."""

    max_tokens: Annotated[Whole, Field(ge=0, le=NO_LIMIT)]
    """Maximum number of tokens of the message, including reasoning. 0 only puts the prompt into the prefix cache."""
    stream: bool = False
    """Send the message as server-sent events while it is generated."""
    metadata: object = None
    """Accepted; has no effect."""
    service_tier: object = None
    """Accepted; has no effect."""
    diagnostics: object = None
    """Accepted; has no effect."""
    inference_geo: object = None
    """Accepted; has no effect."""
    fallbacks: object = None
    """Accepted; has no effect."""
    fallback_credit_token: object = None
    """Accepted; has no effect."""

    def limit(self) -> int | None:
        # An engine caches the prompts of requests that generate something.
        return 1 if self.max_tokens == 0 else super().limit()
