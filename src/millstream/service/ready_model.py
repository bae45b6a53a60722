"""A loaded model as the service sees it, of any kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from millstream.config import ModelSpec
from millstream.model_facts import UNDESCRIBED, ModelDescription, ModelFacts
from millstream.service.engine_client import EngineClient


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """What every kind has. A kind derives its own, with all that its requests need."""

    kind: ClassVar[str] = "model"
    """What the model does, in a word that completes "a model for ..."."""
    capability: ClassVar[str] = ""
    """Its word in `ModelCard.capabilities` for models of this kind."""

    name: str
    engine: EngineClient
    facts: ModelFacts
    spec: ModelSpec

    def clear_cache(self) -> None:
        """Drop what is cached between requests. Most kinds cache nothing."""

    def card_fields(self) -> dict[str, Any]:
        """Fields of the model's card that only this kind has."""
        return {}

    def describe(self) -> ModelDescription:
        """What is known of the model's files. It stays known when the model is unloaded."""
        return UNDESCRIBED
