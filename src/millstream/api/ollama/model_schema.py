"""Response models of the routes about models, for /openapi.json."""

from __future__ import annotations

from millstream.api.response_schema import ResponseSchema


class OllamaDetails(ResponseSchema):
    """What the files of a model say. A text is empty if they do not say it, or are not on this machine yet."""

    parent_model: str
    format: str
    """`gguf` or `safetensors`."""
    family: str
    families: list[str]
    parameter_size: str
    """Such as `7.6B`."""
    quantization_level: str
    """Such as `Q4_K_M`, `4-bit` or `BF16`."""


class _NamedModel(ResponseSchema):
    name: str
    model: str
    """The same as name."""
    size: int
    """Bytes."""
    digest: str
    """Identifies the model on this server. It is a hash of its name, not of its files."""
    details: OllamaDetails


class OllamaListedModel(_NamedModel):
    modified_at: str
    """When the server began to serve it."""


class OllamaTags(ResponseSchema):
    models: list[OllamaListedModel]


class OllamaRunningModel(_NamedModel):
    size_vram: int
    """Bytes of GPU memory; on Apple silicon, all of its memory."""
    expires_at: str
    """When it is unloaded, if no request comes before. A time centuries away means never."""
    context_length: int


class OllamaRunning(ResponseSchema):
    models: list[OllamaRunningModel]


class OllamaModel(ResponseSchema):
    """What is known of a model. It is not loaded for that."""

    modelfile: str
    parameters: str
    """One setting per line: its name, spaces, its value."""
    template: str
    """The source of its chat template, in Jinja."""
    details: OllamaDetails
    model_info: dict[str, object]
    """`general.architecture`, `general.parameter_count`, and the context length of the architecture."""
    capabilities: list[str]
    """`completion`, `tools`, `thinking`, `vision`, `audio`, `insert`."""
    modified_at: str


class OllamaVersion(ResponseSchema):
    version: str
    """The version of Ollama's API that is served."""


class OllamaStatus(ResponseSchema):
    status: str
    """`success` at the end."""
