"""The `options` of a request: sampling parameters, and settings that a server of its own kind decides."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from millstream.api.body import validated
from millstream.api.generation_fields import GenerationFields
from millstream.api.numbers import Whole
from millstream.api.params import supported
from millstream.api.request_docs import complete_body
from millstream.errors import BadRequest
from millstream.parameters import IGNORED as DETAILS
from millstream.parameters import NO_LIMIT, REFUSED, REFUSED_THINKING

UNSUPPORTED = REFUSED | REFUSED_THINKING
IGNORED = DETAILS | {
    "num_ctx", "num_batch", "num_gpu", "num_gqa", "num_keep", "num_thread", "main_gpu", "low_vram", "numa", "f16_kv",
    "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "penalize_newline", "rope_frequency_base",
    "rope_frequency_scale", "draft_num_predict",
}  # fmt: skip
"""Options that have no effect here: they say how Ollama should load a model, or tune what is not supported."""


def _complete(schema: dict[str, Any]) -> None:
    complete_body(schema, UNSUPPORTED, IGNORED)


class OllamaOptions(GenerationFields):
    """Sampling parameters. One that is left out has the model's own default."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=_complete)

    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """0 always picks the most likely token; higher values are more varied. Default: the model's, else 1."""
    num_predict: Annotated[Whole, Field(ge=-2, le=NO_LIMIT)] | None = None
    """Maximum number of tokens to generate. 0 or less: as many as the context holds."""

    def limit(self) -> int | None:
        return NO_LIMIT if self.num_predict is not None and self.num_predict <= 0 else super().limit()


def parse_options(value: object) -> OllamaOptions:
    """Raises on an option that would change the output but is not served."""
    if not isinstance(value, dict):
        raise BadRequest("options must be an object.", param="options")
    served = supported(value, OllamaOptions.model_fields, UNSUPPORTED, IGNORED, prefix="options.")
    try:
        return validated(OllamaOptions, served)
    except BadRequest as error:
        raise BadRequest(f"options.{error.message}", param=f"options.{error.param}") from error
