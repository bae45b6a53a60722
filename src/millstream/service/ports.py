"""The service as dialects see it, as protocols. `api` depends on these and on nothing else of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from millstream.model_facts import ModelCard
from millstream.types import Delta, GenerationRequest, Usage


class Generation(Protocol):
    """One accepted request. The caller must iterate it to its end or `cancel` it."""

    @property
    def model(self) -> str:
        """The name of the model that answers."""
        ...

    @property
    def usage(self) -> Usage:
        """Tokens so far, over all prompts and choices; final once the iteration has ended."""
        ...

    def __aiter__(self) -> AsyncIterator[Sequence[Delta]]:
        """Batches of deltas as they arrive. Each choice ends in one delta with a `finish_reason`.

        Raises `StepFailed` or `EngineGone` if the engine fails the request, and `OutputUnread` if too much is unread.
        """
        ...

    def cancel(self, outcome: str = "cancelled") -> None:
        """Stop the request. Safe at any time and more than once; does not wait. `outcome`: its label in metrics."""
        ...


class GenerationService(Protocol):
    async def start(self, request: GenerationRequest) -> Generation:
        """Find the engine, prepare the prompts, be admitted. Raises a `MillstreamError` if any of it fails.

        If it is cancelled meanwhile, nothing stays admitted.
        """
        ...


class ModelService(Protocol):
    """Models of every kind."""

    def models(self) -> Sequence[ModelCard]: ...

    async def load(self, name: str) -> ModelCard:
        """Load a model now. Returns once it is loaded."""
        ...

    async def unload(self, name: str) -> ModelCard:
        """Free a model, after its running requests have had a moment to finish."""
        ...

    def clear_cache(self, name: str) -> ModelCard:
        """Drop what a model caches between requests, such as prefixes."""
        ...

    def healthy(self) -> dict[str, str]:
        """The state of each model by name, from the service's own memory: no engine is asked."""
        ...

    def render_metrics(self) -> tuple[bytes, str]:
        """The Prometheus page and its content type."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """All use cases, one for each kind of model, and the operations on models."""

    models: ModelService
    generation: GenerationService
