"""The life of one model of the hub: unloaded, loading, ready, failed; loaded again when its engine dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol

from millstream.config import ModelSpec
from millstream.engine.owner import describe
from millstream.errors import EngineGone, LoadCancelled, MillstreamError, ModelError
from millstream.service.memory_budget import Holder, MemoryBudget
from millstream.service.model_change import ModelChange
from millstream.service.ready_model import ReadyModel

log = logging.getLogger(__name__)

MOST_CRASHES = 5
"""In a row, without one answer between them; then the model is given up."""
FIRST_BACKOFF, MOST_BACKOFF = 0.25, 30.0
LOAD_PATIENCE = 3.0
"""Seconds that the end of the server waits for a load that it gave up: a load holds nothing worth saving."""


class ModelState(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"
    STOPPED = "stopped"


class Loading(Protocol):
    """What an opener is given to do its work."""

    def progress(self, done: float) -> None: ...

    async def reserve(self, least: int, want: int) -> int:
        """Reserve memory for the model: see `MemoryBudget.take`."""
        ...

    def idle(self) -> None:
        """The engine has no request any more."""
        ...


Opener = Callable[[Loading], Awaitable[ReadyModel]]
"""Finds, downloads and loads a model. Whatever it raises makes the model failed, with that as the reason."""


class ManagedModel:
    """Whoever needs the model waits for the same load, and a load that fails tells all of them why."""

    def __init__(self, name: str, spec: ModelSpec, opener: Opener, room: MemoryBudget, *, isolation: str) -> None:
        self.name = name
        self.spec = spec
        self.isolation = isolation
        self.created = int(time.time())
        self.error: str | None = None
        self.model: ReadyModel | None = None
        self.done = 0.0
        self.crashes = 0
        self.restarts = 0
        self.loads = 0
        self.last_used = time.monotonic()
        self._state = ModelState.UNLOADED
        self._opener = opener
        self._room = room
        self._leases = 0
        self._change: ModelChange | None = None
        self._guard: asyncio.Task[None] | None = None
        self._closed: str | None = None

    @property
    def state(self) -> ModelState:
        return self._state

    @property
    def in_use(self) -> bool:
        return self._leases > 0 or (self.model is not None and self.model.engine.busy)

    @property
    def holder(self) -> Holder:
        in_use = self.in_use or self._change is not None
        return Holder(self.name, self._room.held_by(self.name), self.last_used, self.spec.pin, in_use)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """While it lasts the model is in use, even if it has no request yet."""
        self._leases += 1
        try:
            yield
        finally:
            self._leases -= 1
            self.idle()

    async def ready(self) -> ReadyModel:
        """The model, loaded if it was not. Raises what the load raised, and `LoadCancelled` if it was given up."""
        while True:
            if self._closed is not None:
                raise EngineGone(self._closed, retry_after=None)
            if self._change is not None:
                await self._change.join()
            elif self.model is not None and not self.model.engine.gone:
                return self.model
            elif self.model is not None and self._guard is not None:
                await asyncio.wait([self._guard])  # it has just ended: what follows is decided there
            elif self._state is ModelState.FAILED:
                raise EngineGone(
                    f"the model {self.name!r} has failed: {self.error} POST /v1/models/{self.name}/load tries again.",
                    retry_after=None,
                )
            else:
                self._begin_load()

    def load_soon(self) -> None:
        """Begin to load, whatever happened before; a load or an engine that is there is left alone."""
        if self._change is None and self.model is None and self._closed is None:
            self.crashes = 0
            self._begin_load()

    async def settled(self) -> None:
        """Returns when no load is under way any more."""
        while self._change is not None:
            await self._change.wait()

    async def unload(self, reason: str, *, grace: float, patience: float) -> None:
        """Let requests inside finish for `grace` seconds, then free the model. A load under way is given up."""
        while (change := self._change) is not None:
            if change.loads:
                change.give_up(
                    LoadCancelled(f"the model {self.name!r} was {reason} while it was loading; ask again to load it")
                )
            await change.wait()
            if change.cancelled or not change.loads:
                return  # what has begun since then is for those who asked later
        if self.model is not None:
            await self._begin_unload(self.model, reason, grace, patience).wait()
        elif self._state is ModelState.FAILED:
            self._state, self.error = ModelState.UNLOADED, None

    async def unload_if_idle(self, reason: str, patience: float) -> None:
        """For making room: a model that somebody has begun to use meanwhile stays."""
        if not self.in_use and self._change is None and self.model is not None:
            await self._begin_unload(self.model, reason, 0.0, patience).wait()

    async def close(self, reason: str, grace: float, patience: float) -> bool:
        """The end of the server. True if the engine freed its model in time."""
        self._closed = reason
        freed = True
        if (change := self._change) is not None:
            given_up = change.loads and change.give_up(EngineGone(reason, retry_after=None))
            freed = await change.wait(min(patience, LOAD_PATIENCE) if given_up else patience)
        if self.model is not None:
            engine = self.model.engine
            await asyncio.wait([asyncio.ensure_future(engine.drained())], timeout=grace)
            freed = await engine.stop(reason, patience)
            if not freed:
                engine.disown(reason)  # a process that does not answer must not outlive the server
        self._state = ModelState.STOPPED
        return freed

    def progress(self, done: float) -> None:
        self.done = done

    async def reserve(self, least: int, want: int) -> int:
        return await self._room.take(self.name, least, want)

    def idle(self) -> None:
        self.last_used = time.monotonic()
        if not self.in_use:
            self._room.changed()

    def _begin_load(self, delay: float = 0.0) -> None:
        assert self._change is None, "one change at a time"
        self._state, self.error, self.done = ModelState.LOADING, None, 0.0
        self._change = ModelChange(self._load(delay), loads=True, ended=self._ended)

    def _begin_unload(self, model: ReadyModel, reason: str, grace: float, patience: float) -> ModelChange:
        assert self._change is None, "one change at a time"
        # Now and not in the task: should the engine die before the task's first step, this is no crash to recover from.
        self.model, self._state, self.crashes = None, ModelState.UNLOADING, 0
        self._change = ModelChange(self._unload(model, reason, grace, patience), loads=False, ended=self._ended)
        return self._change

    def _ended(self, change: ModelChange) -> None:
        self._change = None
        if change.cancelled:
            self._room.give_back(self.name)
            self._state = ModelState.UNLOADED
            log.info("%s: its load was given up", self.name)
        self._room.changed()

    async def _load(self, delay: float) -> None:
        try:
            await asyncio.sleep(delay)
            self.loads += 1
            model = await self._opener(self)
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # the edge of all libraries that open files; a panic of Rust is no Exception
            self._room.give_back(self.name)
            if (told := self._failed_by(error)) is error:
                raise
            raise told from error
        self.model, self._state, self.last_used = model, ModelState.READY, time.monotonic()
        self._guard = asyncio.ensure_future(self._watch(model))
        self._guard.add_done_callback(report_defect)

    def _failed_by(self, error: BaseException) -> MillstreamError:
        """Set the state after a load that raised `error`; what those who wait are told."""
        if isinstance(error, MillstreamError) and not isinstance(error, ModelError):
            log.error("%s: %s", self.name, error.message)
            self._state = ModelState.UNLOADED  # no memory now: not the model's fault
            return error
        reason = describe(error)
        log.error("%s: %s", self.name, reason, exc_info=None if isinstance(error, ModelError) else error)
        self._state, self.error = ModelState.FAILED, reason
        return EngineGone(f"the model {self.name!r} could not be loaded: {reason}", retry_after=None)

    async def _unload(self, model: ReadyModel, reason: str, grace: float, patience: float) -> None:
        try:
            await asyncio.wait([asyncio.ensure_future(model.engine.drained())], timeout=grace)
            if not await model.engine.stop(reason, patience):
                log.error("%s: its engine hangs in a step and is left behind", self.name)
                model.engine.disown(reason)
        finally:
            self._room.give_back(self.name)
            self._state = ModelState.UNLOADED
        log.info("%s: unloaded: %s", self.name, reason)

    async def _watch(self, model: ReadyModel) -> None:
        """An engine that ends unasked is started again, later each time, until that is hopeless."""
        cause = await model.engine.wait_gone()
        if self.model is not model or self._closed is not None:
            return
        self.model = None
        cause = cause or "the engine stopped"
        self.crashes = 1 if model.engine.answered else self.crashes + 1
        if self.crashes >= MOST_CRASHES:
            self._room.give_back(self.name)
            self._state = ModelState.FAILED
            self.error = f"given up after {self.crashes} crashes without an answer; the last: {cause}."
            log.error("%s: %s", self.name, self.error)
            return
        delay = min(MOST_BACKOFF, FIRST_BACKOFF * 2 ** (self.crashes - 1))
        log.error("%s: %s; starting it again in %.2f s", self.name, cause, delay)
        self.restarts += 1
        self._begin_load(delay)


def report_defect(task: asyncio.Future[None]) -> None:
    """For tasks that nobody waits for: what they raise is in the log."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("watching an engine failed", exc_info=error)
