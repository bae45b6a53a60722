"""The models of this server, of every kind: found by name or alias, loaded on demand, unloaded when idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from millstream.config import ModelSpec
from millstream.errors import EngineGone, ModelError, NotFound, WrongModelKind
from millstream.model_facts import ModelCard
from millstream.service.managed_model import ManagedModel, ModelState, Opener, report_defect
from millstream.service.memory_budget import MemoryBudget
from millstream.service.ready_model import ReadyModel
from millstream.service.watchdog import Watchdog

log = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=ReadyModel)


class ModelHub:
    """The first model answers requests that name none."""

    def __init__(
        self,
        *,
        memory: int | None = None,
        idle_unload: float = 0.0,
        step_timeout: float = 0.0,
        grace: float = 20.0,
        patience: float = 30.0,
    ) -> None:
        self._entries: dict[str, ManagedModel] = {}
        self._names: dict[str, ManagedModel] = {}
        self._idle_unload = idle_unload
        self._watchdog = Watchdog(step_timeout)
        self._grace = grace
        self._patience = patience
        self._closing: str | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self.room = MemoryBudget(
            memory,
            holders=lambda: [entry.holder for entry in self._entries.values()],
            unload=self._make_way,
        )

    def add(self, name: str, spec: ModelSpec, opener: Opener, *, isolation: str, now: bool) -> ManagedModel:
        """Serve a model under `name` and its aliases; `now`: begin to load it."""
        entry = ManagedModel(name, spec, opener, self.room, isolation=isolation)
        for known in dict.fromkeys((name, *spec.aliases)):
            if known in self._names:
                raise ModelError(f"two models are called {known!r}; give one of them another name or alias")
            self._names[known] = entry
        self._entries[name] = entry
        if now:
            entry.load_soon()
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch())
            self._watcher.add_done_callback(report_defect)
        return entry

    def cards(self) -> Sequence[ModelCard]:
        return [card_of(entry) for entry in self._entries.values()]

    def card(self, name: str) -> ModelCard:
        return card_of(self._find(name))

    @asynccontextmanager
    async def use(self, name: str, kind: type[ModelT]) -> AsyncIterator[ModelT]:
        """The model, loaded if need be. It is not unloaded until the block ends: until its request has been posted or
        has failed. Raises `WrongModelKind` for a model of another kind."""
        if self._closing is not None:
            raise EngineGone(self._closing, retry_after=None)
        entry = self._find(name)
        with entry.lease():
            model = await entry.ready()
            if not isinstance(model, kind):
                raise WrongModelKind(
                    f"{entry.name!r} is a model for {model.kind}, and this request needs one for {kind.kind}.",
                    param="model",
                )
            yield model

    async def load(self, name: str) -> ModelCard:
        """Returns once it is loaded. A model that had failed gets another chance."""
        entry = self._find(name)
        with entry.lease():
            entry.load_soon()
            await entry.ready()
        return card_of(entry)

    async def unload(self, name: str) -> ModelCard:
        entry = self._find(name)
        await entry.unload("unloaded by request", grace=self._grace, patience=self._patience)
        return card_of(entry)

    def clear_cache(self, name: str) -> ModelCard:
        """Drop what the model caches between requests. A model that is not loaded caches nothing."""
        entry = self._find(name)
        if entry.model is not None:
            entry.model.clear_cache()
        return card_of(entry)

    async def settled(self) -> list[str]:
        """Wait until no model is being loaded; the names of those that are ready or will load when they are used."""
        await asyncio.gather(*(entry.settled() for entry in self._entries.values()))
        return [entry.name for entry in self._entries.values() if entry.state is not ModelState.FAILED]

    async def close(self, reason: str, grace: float, patience: float) -> bool:
        """Take no more requests, let those inside finish for `grace` seconds, then end the engines.

        True if every engine freed its model within `patience` more seconds.
        """
        self._closing = reason
        if self._watcher is not None:
            self._watcher.cancel()
        freed = await asyncio.gather(*(entry.close(reason, grace, patience) for entry in self._entries.values()))
        return all(freed)

    def _find(self, name: str) -> ManagedModel:
        entry = self._names.get(name) if name else next(iter(self._entries.values()), None)
        if entry is None:
            served = ", ".join(self._names) or "none"
            raise NotFound(f"the model {name!r} is not served here. Served: {served}.", param="model")
        return entry

    async def _make_way(self, name: str) -> None:
        await self._entries[name].unload_if_idle("to make room for another model", self._patience)

    async def _watch(self) -> None:
        """Look after all engines: none may hang, and idle ones leave when their time has come."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(self._watchdog.every)
            now = time.monotonic()
            for entry in list(self._entries.values()):
                self._look_at(entry, now - before)
            before = now

    def _look_at(self, entry: ManagedModel, elapsed: float) -> None:
        model = entry.model
        if model is None or entry.state is not ModelState.READY:
            return
        reason = self._watchdog.look(entry.name, model.engine.link.heartbeat(), elapsed)
        if reason is not None:
            log.error("%s: %s", entry.name, reason)
            model.engine.disown(reason)
            return
        limit = self._idle_unload if entry.spec.idle_unload is None else entry.spec.idle_unload
        idle = time.monotonic() - entry.last_used
        if limit and not entry.spec.pin and not entry.in_use and idle > limit:
            task = asyncio.ensure_future(entry.unload_if_idle(f"not used for {idle:.0f} s", self._patience))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            task.add_done_callback(report_defect)


def card_of(entry: ManagedModel) -> ModelCard:
    """What the server knows of a model, from its own memory: no engine is asked."""
    model = entry.model
    engine = model.engine if model else None
    pid, thread = engine.link.where() if engine else (None, None)
    return ModelCard(
        name=entry.name,
        created=entry.created,
        state=entry.state,
        aliases=entry.spec.aliases,
        progress=round(entry.done, 3) if entry.state is ModelState.LOADING else None,
        error=entry.error,
        isolation=entry.isolation,
        pid=pid,
        thread=thread,
        pinned=entry.spec.pin,
        memory_bytes=engine.memory_bytes if engine else 0,
        prefix_cache_bytes=engine.cache_bytes if engine else 0,
        prefix_cache_disk_bytes=engine.disk_bytes if engine else 0,
        reserved_bytes=entry.holder.size or None,
        active=engine.admission.active if engine else 0,
        waiting=engine.admission.waiting if engine else 0,
        restarts=entry.restarts,
        **(model.card_fields() if model else {}),
    )
