"""The life of one model of the hub: unloaded, loading, ready, failed; loaded again when its engine dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from millstream.config import ModelSpec
from millstream.errors import EngineGone, MillstreamError, ModelError
from millstream.media.port import MediaReader
from millstream.service.engine_client import EngineClient
from millstream.service.room import Holder, Room
from millstream.service.template_host import TemplateHost
from millstream.text.control_tokens import ControlTokens
from millstream.text.style import PLAIN, Style
from millstream.text.tokenizer import Tokenizer
from millstream.types import ModelFacts

log = logging.getLogger(__name__)

MOST_CRASHES = 5
"""In a row, without one answer between them; then the model is given up."""
FIRST_BACKOFF, MOST_BACKOFF = 0.25, 30.0


class ModelState(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """All that a request needs of a model."""

    name: str
    engine: EngineClient
    tokenizer: Tokenizer
    facts: ModelFacts
    spec: ModelSpec
    style: Style = PLAIN
    reader: MediaReader | None = None
    """For the images of a model that takes them."""
    template: TemplateHost | None = None
    control: ControlTokens | None = None
    """What must not be taken for control in messages; None where clients may write control tokens."""

    @property
    def kinds(self) -> frozenset[str]:
        """Of media: what can be prepared and what the engine has a tower for. A folder may name one and lack it."""
        return frozenset(self.facts.media).intersection(self.reader.marks if self.reader is not None else ())


class Loading(Protocol):
    """What an opener is given to do its work."""

    def progress(self, done: float) -> None: ...

    async def make_room(self, least: int, want: int) -> int:
        """Reserve memory for the model: see `Room.take`."""
        ...

    def idle(self) -> None:
        """The engine has no request any more."""
        ...


Opener = Callable[[Loading], Awaitable[ReadyModel]]
"""Finds, downloads and loads a model; raises a `MillstreamError`."""


class Entry:
    """Whoever needs the model waits for the same load, and a load that fails tells all of them why."""

    def __init__(self, name: str, spec: ModelSpec, opener: Opener, room: Room, *, isolation: str) -> None:
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
        self._change: asyncio.Task[None] | None = None
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
        """The model, loaded if it was not. Raises what the load raised."""
        while True:
            if self._closed is not None:
                raise EngineGone(self._closed)
            if self._change is not None:
                await asyncio.shield(self._change)
            elif self.model is not None and not self.model.engine.gone:
                return self.model
            elif self.model is not None and self._guard is not None:
                await asyncio.wait([self._guard])  # it has just ended: what follows is decided there
            elif self._state is ModelState.FAILED:
                raise EngineGone(
                    f"the model {self.name!r} has failed: {self.error} POST /v1/models/{self.name}/load tries again."
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
            await asyncio.wait([self._change])

    async def unload(self, reason: str, *, grace: float, patience: float) -> None:
        """Let requests inside finish for `grace` seconds, then free the model. A load under way is given up."""
        if self._change is not None and self._state is ModelState.LOADING:
            self._change.cancel()
        await self.settled()
        if self.model is not None and self._change is None:
            self._begin(self._unload(self.model, reason, grace, patience))
        elif self._state is ModelState.FAILED:
            self._state, self.error = ModelState.UNLOADED, None
        await self.settled()

    async def unload_if_idle(self, reason: str, patience: float) -> None:
        """For making room: a model that somebody has begun to use meanwhile stays."""
        if not self.in_use and self._change is None and self.model is not None:
            self._begin(self._unload(self.model, reason, 0.0, patience))
            await self.settled()

    async def close(self, reason: str, grace: float, patience: float) -> bool:
        """The end of the server. True if the engine freed its model in time."""
        self._closed = reason
        freed = True
        if (change := self._change) is not None:
            if self._state is ModelState.LOADING:
                change.cancel()
            await asyncio.wait([change], timeout=patience)
            freed = change.done()
        if self.model is not None:
            await asyncio.wait([asyncio.ensure_future(self.model.engine.drained())], timeout=grace)
            freed = await self.model.engine.stop(reason, patience)
        self._state = ModelState.STOPPED
        return freed

    def progress(self, done: float) -> None:
        self.done = done

    async def make_room(self, least: int, want: int) -> int:
        return await self._room.take(self.name, least, want)

    def idle(self) -> None:
        self.last_used = time.monotonic()
        if not self.in_use:
            self._room.changed()

    def _begin(self, change: Coroutine[Any, Any, None]) -> None:
        """One change at a time. What it raises is told to those who wait, and it is in the log."""

        async def run() -> None:
            try:
                await change
            finally:
                # Here and not in a callback: whoever waits for the task must find it over.
                self._change = None
                self._room.changed()

        def ended(task: asyncio.Task[None]) -> None:
            change.close()  # a task that was cancelled before its first step has not run at all
            if self._change is task:
                self._change, self._state = None, ModelState.UNLOADED
            if not task.cancelled():
                task.exception()

        self._change = asyncio.ensure_future(run())
        self._change.add_done_callback(ended)

    def _begin_load(self, delay: float = 0.0) -> None:
        self._state, self.error, self.done = ModelState.LOADING, None, 0.0
        self._begin(self._load(delay))

    async def _load(self, delay: float) -> None:
        try:
            await asyncio.sleep(delay)
            self.loads += 1
            self.model = await self._opener(self)
        except MillstreamError as error:
            self._room.give_back(self.name)
            log.error("%s: %s", self.name, error.message)
            if isinstance(error, ModelError):
                self._state, self.error = ModelState.FAILED, error.message
                raise EngineGone(f"the model {self.name!r} could not be loaded: {error.message}") from error
            self._state = ModelState.UNLOADED
            raise
        except asyncio.CancelledError:
            self._room.give_back(self.name)
            self._state = ModelState.UNLOADED
            raise EngineGone(f"the load of {self.name!r} was given up") from None
        self._state = ModelState.READY
        self.last_used = time.monotonic()
        self._guard = asyncio.ensure_future(self._watch(self.model))
        self._guard.add_done_callback(report_defect)

    async def _unload(self, model: ReadyModel, reason: str, grace: float, patience: float) -> None:
        self.model, self._state, self.crashes = None, ModelState.UNLOADING, 0
        await asyncio.wait([asyncio.ensure_future(model.engine.drained())], timeout=grace)
        if not await model.engine.stop(reason, patience):
            log.error("%s: its engine hangs in a step and is left behind", self.name)
            model.engine.disown(reason)
        self._room.give_back(self.name)
        self._state = ModelState.UNLOADED
        log.info("%s: unloaded: %s", self.name, reason)

    async def _watch(self, model: ReadyModel) -> None:
        """An engine that ends unasked is started again, later each time, until that is hopeless."""
        cause = await model.engine.wait_gone()
        if cause is None or self.model is not model or self._closed is not None:
            return
        self.model = None
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
