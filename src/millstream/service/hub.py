"""The models of this server: each has a name, a state and, once it is ready, an engine and a tokenizer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from millstream.errors import EngineGone, MillstreamError, NotFound
from millstream.service.engine_client import EngineClient
from millstream.text.tokenizer import Tokenizer
from millstream.types import ModelCard, ModelFacts

log = logging.getLogger(__name__)


class ModelState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """All that a request needs of a model."""

    name: str
    engine: EngineClient
    tokenizer: Tokenizer
    facts: ModelFacts


Opener = Callable[[], Awaitable[ReadyModel]]
"""Finds, downloads and loads a model; raises a `MillstreamError`."""


class Entry:
    """One model of the hub. `ready` is one task: whoever needs the model waits for the same load."""

    def __init__(self, name: str, opener: Opener) -> None:
        self.name = name
        self.created = int(time.time())
        self.error: str | None = None
        self.model: ReadyModel | None = None
        self._state = ModelState.LOADING
        self._task = asyncio.ensure_future(self._open(opener))

    @property
    def state(self) -> ModelState:
        """A ready model whose engine has crashed is a failed one."""
        if self._state is ModelState.READY and self.model is not None and self.model.engine.gone:
            return ModelState.FAILED
        return self._state

    async def ready(self) -> ReadyModel:
        model = self.model or await asyncio.shield(self._task)
        if model is None:
            raise EngineGone(f"the model {self.name!r} could not be loaded: {self.error}")
        return model

    async def _open(self, opener: Opener) -> ReadyModel | None:
        try:
            self.model = await opener()
        except MillstreamError as error:
            self._state, self.error = ModelState.FAILED, error.message
            log.error("%s: %s", self.name, error.message)
            return None
        self._state = ModelState.READY
        return self.model

    async def stop(self, reason: str, patience: float) -> bool:
        """A load that is under way is cancelled: its opener ends the engine it has started."""
        self._task.cancel()
        await asyncio.wait([self._task], timeout=patience)
        self._state = ModelState.STOPPED
        if self.model is None:
            return self._task.done()
        return await self.model.engine.stop(reason, patience)


class ModelHub:
    """Finds models by name. The first one answers requests that name none."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._closing: str | None = None

    def add(self, name: str, opener: Opener) -> Entry:
        """Start to load a model under `name`."""
        entry = self._entries[name] = Entry(name, opener)
        return entry

    def cards(self) -> Sequence[ModelCard]:
        return [
            ModelCard(entry.name, entry.created, entry.state, entry.model.facts.context_length if entry.model else None)
            for entry in self._entries.values()
        ]

    async def find(self, name: str) -> ReadyModel:
        if self._closing is not None:
            raise EngineGone(self._closing)
        entry = self._entries.get(name) if name else next(iter(self._entries.values()), None)
        if entry is None:
            served = ", ".join(self._entries) or "none"
            raise NotFound(f"the model {name!r} is not served here. Served: {served}.", param="model")
        return await entry.ready()

    async def settled(self) -> list[str]:
        """Wait until every model is loaded or has failed; the names of those that are ready."""
        await asyncio.gather(*(entry.ready() for entry in self._entries.values()), return_exceptions=True)
        return [entry.name for entry in self._entries.values() if entry.state is ModelState.READY]

    async def close(self, reason: str, grace: float, patience: float) -> bool:
        """Take no more requests, let those inside finish for `grace` seconds, then end the engines.

        True if every engine freed its model within `patience` more seconds.
        """
        self._closing = reason
        engines = [entry.model.engine for entry in self._entries.values() if entry.model is not None]
        if engines:
            await asyncio.wait([asyncio.ensure_future(engine.drained()) for engine in engines], timeout=grace)
        freed = await asyncio.gather(*(entry.stop(reason, patience) for entry in self._entries.values()))
        return all(freed)
