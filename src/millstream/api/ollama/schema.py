"""Request models of Ollama's API. A field that is null counts as not given, and unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.functions import Tools
from millstream.api.numbers import Whole
from millstream.api.ollama.fields import (
    FORMAT,
    KEEP_ALIVE,
    THINK,
    parse_format,
    parse_keep_alive,
    parse_think,
)
from millstream.api.ollama.images import IMAGES, Part, parse_images
from millstream.api.ollama.messages import MESSAGES, Message, parse_messages
from millstream.api.ollama.options import OllamaOptions
from millstream.api.ollama.tools import TOOLS, parse_tools
from millstream.api.params import Neutrals
from millstream.api.request_docs import complete_body
from millstream.parameters import PARAMETERS, REFUSED
from millstream.types import Grammar

MessageList = Annotated[tuple[Message, ...], PlainValidator(parse_messages), WithJsonSchema(MESSAGES)]
ToolList = Annotated[Tools, PlainValidator(parse_tools), WithJsonSchema(TOOLS)]
ImageList = Annotated[list[Part], PlainValidator(lambda value: parse_images(value, "images")), WithJsonSchema(IMAGES)]
Format = Annotated[Grammar | None, PlainValidator(parse_format), WithJsonSchema(FORMAT)]
Think = Annotated[bool | str | None, PlainValidator(parse_think), WithJsonSchema(THINK)]
KeepAlive = Annotated[float, PlainValidator(parse_keep_alive), WithJsonSchema(KEEP_ALIVE)]

UNSUPPORTED: Neutrals = {
    **REFUSED,
    **{name: (row.neutral,) for row in PARAMETERS for name in row.all_names},
    "template": ("",),
}
"""Fields that would change the output, each with the values that have no effect. Parameters belong into the options."""

CONFIG = ConfigDict(strict=True, use_attribute_docstrings=True)


class OllamaTextRequest(BaseModel):
    """Fields of both endpoints."""

    model_config = CONFIG | ConfigDict(json_schema_extra=lambda schema: complete_body(schema, UNSUPPORTED))

    model: str | None = None
    """The model's name, as listed by /api/tags, with or without `:latest`. Default: the server's first model."""
    stream: bool | None = None
    """Send the output as lines of JSON while it is generated. Default: true."""
    format: Format | None = None
    """Structured output: `json`, or a JSON schema."""
    think: Think | None = None
    """Whether to reason before the output, or how much. Default: as the model does by itself."""
    keep_alive: KeepAlive | None = None
    """How long the model stays loaded after this request: seconds, or a duration such as `5m`. Negative: for ever."""
    options: OllamaOptions | None = None
    """Sampling parameters."""
    logprobs: bool | None = None
    """Return the log-probability of each token."""
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    """With logprobs: also return this many of the most likely tokens at each position."""

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class OllamaChatRequest(OllamaTextRequest):
    """A conversation to continue. Without messages, the model is loaded, or unloaded if keep_alive is 0."""

    messages: MessageList | None = None
    """The conversation so far."""
    tools: ToolList | None = None
    """Functions that the model may call."""


class OllamaGenerateRequest(OllamaTextRequest):
    """A prompt to respond to. Without a prompt, the model is loaded, or unloaded if keep_alive is 0."""

    prompt: str | None = None
    """The prompt. The chat template makes it a user message, unless raw or suffix is set."""
    suffix: str | None = None
    """Text after the gap, for models that can fill in the middle."""
    system: str | None = None
    """The system message."""
    raw: bool | None = None
    """Continue the prompt as it is, without the chat template."""
    images: ImageList | None = None
    """Images of the prompt, for vision models."""


def name_field(fields: dict[str, Any]) -> None:
    """`name` is the old name of `model`."""
    fields["properties"]["name"] = {"type": ["string", "null"], "description": "The old name of model."}


class OllamaModelRequest(BaseModel):
    """Names a model."""

    model_config = CONFIG | ConfigDict(json_schema_extra=name_field)

    model: str | None = None
    """The model's name, as listed by /api/tags."""


class OllamaShowRequest(OllamaModelRequest):
    """Asks for what is known of a model."""

    verbose: bool | None = None
    """Accepted; has no effect."""


class OllamaPullRequest(OllamaModelRequest):
    """Asks for a model."""

    stream: bool | None = None
    """Send the status as lines of JSON. Default: true."""
    insecure: bool | None = None
    """Accepted; has no effect."""
