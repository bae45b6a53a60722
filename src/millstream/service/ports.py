"""What a dialect needs of the service, as protocols: `api` depends on these and on nothing else of the floor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from millstream.types import Delta, GenerationRequest, ModelCard, Usage


class Generation(Protocol):
    """One accepted request. Iterate it to its end, or `cancel` it: the caller owes it one of the two."""

    @property
    def model(self) -> str:
        """The name of the model that answers."""
        ...

    @property
    def usage(self) -> Usage:
        """Tokens so far, of all prompts and choices together; final once the iteration has ended."""
        ...

    def __aiter__(self) -> AsyncIterator[Sequence[Delta]]:
        """Batches of deltas as they come. Each choice ends in one delta with a `finish_reason`.

        Raises `StepFailed` or `EngineGone` when the engine fails the request, and `OutputUnread` when too much waits.
        """
        ...

    def cancel(self, outcome: str = "cancelled") -> None:
        """Leave. Safe at any time and more than once; does not wait. `outcome`: what the metrics count it as."""
        ...


class TextService(Protocol):
    def models(self) -> Sequence[ModelCard]: ...

    async def load(self, name: str) -> ModelCard:
        """Load a model now, and return when it is there."""
        ...

    async def unload(self, name: str) -> ModelCard:
        """Free a model, after the requests inside have had a moment to finish."""
        ...

    def clear_cache(self, name: str) -> ModelCard:
        """Have a model forget the beginnings of prompts that it keeps."""
        ...

    def healthy(self) -> dict[str, str]:
        """The state of each model, by name, from the service's own memory: no engine is asked."""
        ...

    async def start(self, request: GenerationRequest) -> Generation:
        """Find the engine, prepare the prompts, be admitted. Raises a `MillstreamError` if any of it fails.

        May be cancelled while it waits: then nothing stays admitted.
        """
        ...

    def render_metrics(self) -> tuple[bytes, str]:
        """The Prometheus page and its content type."""
        ...
