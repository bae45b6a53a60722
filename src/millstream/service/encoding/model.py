"""Loaded embedding models and rerankers, as the service sees them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from millstream.model_facts import UNDESCRIBED, EncoderFacts, ModelDescription
from millstream.service.ready_model import ReadyModel
from millstream.text.inputs import EncoderTokenizer
from millstream.text.pairs import PairEncoder


@dataclass(frozen=True, slots=True)
class EncoderModel(ReadyModel):
    facts: EncoderFacts
    files: ModelDescription = UNDESCRIBED
    """What its files say about it."""

    def card_fields(self) -> dict[str, Any]:
        return {"context_length": self.facts.context_length, "max_batch": self.facts.capacity}

    def describe(self) -> ModelDescription:
        return replace(self.files, context_length=self.facts.context_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingModel(EncoderModel):
    kind: ClassVar[str] = "embeddings"
    capability: ClassVar[str] = "embedding"

    tokenizer: EncoderTokenizer
    prompts: dict[str, str]
    """What the model wants before an input, by name."""
    default_prompt: str | None = None
    dimensions: tuple[int, ...] = ()
    """Sizes that its vectors may be cut to. Empty: any."""

    def card_fields(self) -> dict[str, Any]:
        return {**EncoderModel.card_fields(self), "dimensions": self.facts.width}


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankModel(EncoderModel):
    kind: ClassVar[str] = "reranking"
    capability: ClassVar[str] = "rerank"

    pairs: PairEncoder
