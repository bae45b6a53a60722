"""Operations on models of every kind: list, load, unload, clear caches, health, metrics. See `ports.ModelService`."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.model_facts import ModelCard
from millstream.service.hub import ModelHub
from millstream.service.metrics import Metrics


class ModelOperations:
    def __init__(self, hub: ModelHub, metrics: Metrics) -> None:
        self._hub = hub
        self._metrics = metrics

    def models(self) -> Sequence[ModelCard]:
        return self._hub.cards()

    def model(self, name: str) -> ModelCard:
        return self._hub.card(name)

    def healthy(self) -> dict[str, str]:
        return {card.name: card.state for card in self._hub.cards()}

    def render_metrics(self) -> tuple[bytes, str]:
        return self._metrics.render()

    async def load(self, name: str) -> ModelCard:
        return await self._hub.load(name)

    async def unload(self, name: str) -> ModelCard:
        return await self._hub.unload(name)

    def keep_loaded(self, name: str, seconds: float | None) -> ModelCard:
        return self._hub.keep_loaded(name, seconds)

    def clear_cache(self, name: str) -> ModelCard:
        return self._hub.clear_cache(name)
