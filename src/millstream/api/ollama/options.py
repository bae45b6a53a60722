"""The `options` of a request: sampling parameters, and settings that a server of its own kind decides."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.numbers import Whole
from millstream.api.ollama.fields import STOP, parse_stop
from millstream.api.params import Neutrals, supported
from millstream.errors import BadRequest
from millstream.types import SAMPLING_FIELDS, Sampling

_INT32 = 2**31 - 1
_INT64 = 2**63

UNSUPPORTED: Neutrals = {"mirostat": (0,), "tfs_z": (0, 1), "typical_p": (0, 1)}
"""Options that would change the output, each with the values that switch it off."""

IGNORED = (
    "num_ctx", "num_batch", "num_gpu", "num_gqa", "num_keep", "num_thread", "main_gpu", "low_vram", "numa", "f16_kv",
    "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "penalize_newline", "mirostat_tau",
    "mirostat_eta", "rope_frequency_base", "rope_frequency_scale", "draft_num_predict",
)  # fmt: skip
"""Options that have no effect here: they say how Ollama should load a model, or tune what is not supported."""


def _complete(schema: dict[str, Any]) -> None:
    """Adds the options that are accepted without effect."""
    for name in IGNORED:
        schema["properties"].setdefault(name, {"description": "Accepted; has no effect."})
    for name, neutrals in UNSUPPORTED.items():
        description = "Not supported. Only values without effect are accepted."
        schema["properties"][name] = {"enum": [None, *neutrals], "description": description}


Penalty = Annotated[float, Field(ge=-2, le=2)]


class OllamaOptions(BaseModel):
    """Sampling parameters. One that is left out has the model's own default."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=_complete)

    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """0 always picks the most likely token; higher values are more varied."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from the most likely tokens that together reach this probability."""
    top_k: Annotated[Whole, Field(ge=-1, le=_INT32)] | None = None
    """Sample from this many of the most likely tokens. 0 or -1 disables it."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Exclude tokens whose probability is below this fraction of the most likely token's."""
    seed: Annotated[Whole, Field(ge=-_INT64, lt=_INT64)] | None = None
    """The same seed and parameters sample the same tokens. -1, as without it: a random seed."""
    num_predict: Annotated[Whole, Field(ge=-2, le=_INT32)] | None = None
    """Maximum number of tokens to generate. 0 or less: as many as the context holds."""
    stop: Annotated[tuple[str, ...], PlainValidator(parse_stop), WithJsonSchema(STOP)] | None = None
    """Stop strings: the output ends before the first of them."""
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    """Above 1: tokens that are in the prompt or the output already become less likely, by division."""
    presence_penalty: Penalty | None = None
    """Above 0: tokens that were generated before become less likely, by a fixed amount."""
    frequency_penalty: Penalty | None = None
    """Above 0: tokens that were generated before become less likely, with each occurrence."""
    repeat_last_n: Annotated[Whole, Field(ge=-1, le=_INT32)] | None = None
    """0 disables the three penalties. Any other value has no effect: penalties look at all tokens."""

    @property
    def max_tokens(self) -> int | None:
        """None leaves it to the model's own default. A client that asks for no limit gets none but the context."""
        return _INT32 if self.num_predict is not None and self.num_predict <= 0 else self.num_predict

    @property
    def seeded(self) -> bool:
        return self.seed not in (None, -1)

    def sampling(self) -> tuple[Sampling, frozenset[str]]:
        """Returns the parameters, and the names of those that the client did not set."""
        values: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "seed": self.seed if self.seeded else None,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        if self.top_p == 0:  # nothing but the most likely token
            values |= {"top_p": 1.0, "top_k": 1}
        if self.repeat_last_n == 0:
            values |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        given = {name: value for name, value in values.items() if value is not None}
        unset = SAMPLING_FIELDS - given.keys()
        return Sampling(**{"temperature": 1.0, **given}), unset


def served_options(value: object) -> dict[str, object]:
    """Returns the options that have an effect. Raises on one that would change the output but is not served."""
    if not isinstance(value, dict):
        raise BadRequest("options must be an object.", param="options")
    return supported(value, OllamaOptions.model_fields, UNSUPPORTED, IGNORED, prefix="options.")
