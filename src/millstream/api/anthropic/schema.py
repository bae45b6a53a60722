"""Request models of Anthropic's endpoints. Numbers are strict: neither a string nor true is a number."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.anthropic import request_docs as docs
from millstream.api.anthropic.tools import ToolList, parse_tools
from millstream.api.numbers import Whole
from millstream.errors import BadRequest
from millstream.types import Sampling

_INT32 = 2**31 - 1


def parse_stops(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > docs.MAX_STOPS:
        raise BadRequest(f"stop_sequences must be a list of at most {docs.MAX_STOPS} strings.", param="stop_sequences")
    for index, stop in enumerate(value):
        if not isinstance(stop, str) or not 0 < len(stop) <= docs.MAX_STOP_LENGTH:
            param = f"stop_sequences[{index}]"
            raise BadRequest(f"{param} must be a string of 1 to {docs.MAX_STOP_LENGTH} characters.", param=param)
    return tuple(value)


# The service's seal is needed to parse messages, so they are parsed later.
Messages = Annotated[object, WithJsonSchema(docs.MESSAGES)]
System = Annotated[object, WithJsonSchema(docs.SYSTEM)]
Tools = Annotated[ToolList, PlainValidator(parse_tools), WithJsonSchema(docs.TOOLS)]
ToolChoice = Annotated[object, WithJsonSchema(docs.TOOL_CHOICE)]
ThinkingConfig = Annotated[object, WithJsonSchema(docs.THINKING)]
OutputConfig = Annotated[dict[str, Any], WithJsonSchema(docs.OUTPUT_CONFIG)]
OutputFormat = Annotated[object, WithJsonSchema(docs.OUTPUT_FORMAT)]
Stops = Annotated[tuple[str, ...], PlainValidator(parse_stops), WithJsonSchema(docs.STOPS)]


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


class MessagesRequest(CountRequest):
    """A conversation to continue with one message of the assistant."""

    max_tokens: Annotated[Whole, Field(ge=0, le=_INT32)]
    """Maximum number of tokens of the message, including reasoning. 0 only puts the prompt into the prefix cache."""
    temperature: Annotated[float, Field(ge=0, le=1)] = 1.0
    """0 always picks the most likely token; higher values are more varied."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Sample from the most likely tokens that together reach this probability."""
    top_k: Annotated[Whole, Field(ge=-1, le=_INT32)] = 0
    """Sample from this many of the most likely tokens. 0 or -1 disables it."""
    stop_sequences: Stops = ()
    """The message ends before the first of these strings."""
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

    def sampling(self) -> Sampling:
        if self.top_p == 0:  # no token but the most likely one
            return Sampling(temperature=self.temperature, top_k=1)
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=max(self.top_k, 0))
