"""The life cycle of one model: unloaded, loading, ready, failed. Restarts its engine after a crash."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

from millstream.config import ModelSpec
from millstream.deadline import Deadline
from millstream.engine.owner import describe
from millstream.errors import EngineDied, EngineGone, LoadCancelled, MillstreamError, ModelError
from millstream.model_facts import UNDESCRIBED, LoadProgress
from millstream.service.memory_budget import MemoryBudget, Reservation
from millstream.service.model_change import ModelChange
from millstream.service.ready_model import ReadyModel

log = logging.getLogger(__name__)

MAX_CRASHES = 5
"""Consecutive crashes without an answer, also while the model is loaded, after which it has failed."""
FIRST_BACKOFF, MAX_BACKOFF = 0.25, 30.0
CANCELLED_LOAD_SECONDS = 2.0
"""How long the server's shutdown waits for a cancelled load, which has nothing worth saving."""


class ModelState(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"
    STOPPED = "stopped"


class LoadContext(Protocol):
    """What a loader may use of the model that it loads."""

    def report_progress(self, progress: LoadProgress) -> None:
        """On the event loop."""
        ...

    async def reserve(self, minimum: int, wanted: int) -> int:
        """Reserve memory for the model: see `MemoryBudget.reserve`."""
        ...

    def became_idle(self) -> None:
        """The engine's last request has ended."""
        ...


Loader = Callable[[LoadContext], Awaitable[ReadyModel]]
"""Finds, downloads and loads a model. If it raises, the model has failed, with that error as the reason."""


class ManagedModel:
    """All requests for the model wait for the same load. If it fails, each of them gets the reason."""

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        loader: Loader,
        budget: MemoryBudget,
        *,
        isolation: str,
        idle_unload: float = 0.0,
    ) -> None:
        """`idle_unload`: idle seconds after which it is unloaded, if its spec does not say; 0 for never."""
        self.name = name
        self.spec = spec
        self.isolation = isolation
        self.created = int(time.time())
        self.error: str | None = None
        self.model: ReadyModel | None = None
        self.leaving: ReadyModel | None = None
        """The model while it is unloaded: its last requests may still run."""
        self.progress = LoadProgress()
        """Of the load, while there is one."""
        self.crashes = 0
        self.restarts = 0
        self.loads = 0
        self.last_used = time.monotonic()
        self.keep_loaded: float | None = None
        """Idle seconds after which it is unloaded, if a client said so. Holds until the model is unloaded: a client
        that unloads it at once does not do so for the requests of others that load it again."""
        self.description = UNDESCRIBED
        """Kept when the model is unloaded."""
        self._idle_unload = idle_unload
        self._state = ModelState.UNLOADED
        self._loader = loader
        self._budget = budget
        self._leases = 0
        self._change: ModelChange | None = None
        self._restart_in: float | None = None
        """The engine died while it loaded the model: the seconds after which the next load begins."""
        self._monitor: asyncio.Task[None] | None = None
        self._closed: str | None = None
        self._became_idle = asyncio.Event()
        self._grace_over = asyncio.Event()
        """Set when the server stops: an unload that lets requests finish without a limit must not hold it up."""

    @property
    def state(self) -> ModelState:
        return self._state

    @property
    def in_use(self) -> bool:
        return self._leases > 0 or (self.model is not None and self.model.engine.busy)

    @property
    def idle_limit(self) -> float | None:
        """Idle seconds after which it is unloaded. None for never."""
        if self.spec.pin:
            return None
        if self.keep_loaded is not None:
            return self.keep_loaded
        return (self._idle_unload if self.spec.idle_unload is None else self.spec.idle_unload) or None

    @property
    def idle_seconds(self) -> float:
        """Seconds since its last request ended; 0 while one is running."""
        return 0.0 if self.in_use else time.monotonic() - self.last_used

    @property
    def is_due(self) -> bool:
        """True if it has been idle for so long that it should be unloaded."""
        limit = self.idle_limit
        return limit is not None and self.model is not None and not self.in_use and self.idle_seconds >= limit

    @property
    def reservation(self) -> Reservation:
        in_use = self.in_use or self._change is not None
        return Reservation(self.name, self._budget.reserved_by(self.name), self.last_used, self.spec.pin, in_use)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """While the lease lasts, the model counts as in use, even without a request."""
        self.begin_lease()
        try:
            yield
        finally:
            self.end_lease()

    def begin_lease(self) -> None:
        """See `lease`. Each needs one `end_lease`."""
        self._leases += 1

    def end_lease(self) -> None:
        self._leases -= 1
        self.became_idle()

    async def ready(self) -> ReadyModel:
        """Returns the model; loads it if needed. Raises the error of the load, `LoadCancelled` if the load is
        cancelled."""
        while True:
            if self._closed is not None:
                raise EngineGone(self._closed, retry_after=None)
            if self._change is not None:
                await self._change.join()
            elif self.model is not None and not self.model.engine.gone:
                return self.model
            elif self.model is not None and self._monitor is not None:
                await asyncio.wait([self._monitor])  # the engine has just ended: the monitor decides what follows
            elif self._state is ModelState.FAILED:
                raise EngineGone(
                    f"the model {self.name!r} has failed: {(self.error or '').rstrip('.')}. "
                    f"POST /v1/models/{self.name}/load tries again.",
                    retry_after=None,
                )
            else:
                self._begin_load()

    def load_soon(self) -> None:
        """Start to load, also after a failure. Does nothing if the model is loaded or about to be."""
        if self._change is None and self.model is None and self._closed is None:
            self.crashes = 0
            self._begin_load()

    async def settled(self) -> None:
        """Returns when no load or unload is under way."""
        while self._change is not None:
            await self._change.wait()

    def configure(self, spec: ModelSpec, loader: Loader, *, isolation: str) -> None:
        """Set new options. Those that are fixed when the model is loaded take effect with the next load."""
        self.spec, self._loader, self.isolation = spec, loader, isolation
        if self.model is not None:
            self.model = replace(self.model, spec=spec)

    async def reload(self, reason: str, patience: float) -> None:
        """Load the model again if it is loaded, loading or failed. Running requests finish first; requests that come
        meanwhile, or that wait for a load under way, wait for the new load."""
        if (change := self._change) is not None:
            if not change.loads:
                return  # the next load has the new options
            change.cancel(None)
            await change.wait()
            await asyncio.sleep(0)  # if it had just ended, its callback runs now
        if self._closed is not None:
            return
        if self.model is not None and self._change is None:
            await self._begin_unload(self.model, reason, None, patience).wait()
        elif change is None and self._state is not ModelState.FAILED:
            return
        self.load_soon()

    async def retire(self, reason: str, patience: float) -> None:
        """Free the model once the last of its requests has ended, which new ones must not prevent."""
        while self.in_use:
            self._became_idle.clear()
            await self._became_idle.wait()
        await self.unload(reason, grace=0.0, patience=patience)

    async def unload(self, reason: str, *, grace: float, patience: float) -> None:
        """Let running requests finish for `grace` seconds, then free the model. Cancels a load under way."""
        while (change := self._change) is not None:
            if change.loads:
                change.cancel(
                    LoadCancelled(
                        f"the model {self.name!r} was {reason} while it was loading; send the request again to load it"
                    )
                )
            await change.wait()
            if change.cancelled or not change.loads:
                return  # a load that has begun since then is for later requests
        if self.model is not None:
            await self._begin_unload(self.model, reason, grace, patience).wait()
        elif self._state is ModelState.FAILED:
            self._state, self.error = ModelState.UNLOADED, None

    async def unload_if_idle(self, reason: str, patience: float) -> None:
        """Free the model, unless it has come into use or is loading or unloading."""
        if not self.in_use and self._change is None and self.model is not None:
            await self._begin_unload(self.model, reason, 0.0, patience).wait()

    async def close(self, reason: str, grace: float, patience: float) -> bool:
        """The server stops. Returns True if the engine freed its model in time."""
        self._closed = reason
        drained, end = Deadline(grace), Deadline(grace + patience)
        freed = True
        if (change := self._change) is not None:
            cancelled = change.loads and change.cancel(EngineGone(reason, retry_after=None))
            asyncio.get_running_loop().call_later(grace, self._grace_over.set)
            freed = await change.wait(min(end.left, CANCELLED_LOAD_SECONDS) if cancelled else end.left)
        if self.model is not None:
            engine = self.model.engine
            await asyncio.wait([asyncio.ensure_future(engine.drained())], timeout=drained.left)
            freed = await engine.stop(reason, end.left)
            if not freed:
                engine.disown(reason)  # a process that hangs must not outlive the server
        self._state = ModelState.STOPPED
        return freed

    def report_progress(self, progress: LoadProgress) -> None:
        self.progress = progress

    async def reserve(self, minimum: int, wanted: int) -> int:
        return await self._budget.reserve(self.name, minimum, wanted)

    def became_idle(self) -> None:
        self.last_used = time.monotonic()
        if not self.in_use:
            self._became_idle.set()
            self._budget.notify()

    def _begin_load(self, delay: float = 0.0) -> None:
        assert self._change is None, "one change at a time"
        self._state, self.error, self.progress = ModelState.LOADING, None, LoadProgress()
        self._change = ModelChange(self._load(delay), loads=True, on_end=self._change_ended)

    def _begin_unload(self, model: ReadyModel, reason: str, grace: float | None, patience: float) -> ModelChange:
        assert self._change is None, "one change at a time"
        # Here and not in the task: an engine that dies before the task's first step must not be restarted.
        self.model, self.leaving = None, model
        self._state, self.crashes, self.keep_loaded = ModelState.UNLOADING, 0, None
        self._change = ModelChange(self._unload(model, reason, grace, patience), loads=False, on_end=self._change_ended)
        return self._change

    def _change_ended(self, change: ModelChange) -> None:
        self._change = None
        if change.cancelled:
            self._budget.release(self.name)
            self._state, self.crashes = ModelState.UNLOADED, 0
            log.info("%s: load cancelled", self.name)
        delay, self._restart_in = self._restart_in, None
        if delay is not None and self._closed is None:
            self._begin_load(delay)
        self._budget.notify()

    async def _load(self, delay: float) -> None:
        try:
            await asyncio.sleep(delay)
            self.loads += 1
            model = await self._loader(self)
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # any library that reads files may raise here; a Rust panic is not an Exception
            self._budget.release(self.name)
            if (reported := self._record_failure(error)) is error:
                raise
            raise reported from error
        # Its options may have changed during the load.
        model = model if model.spec == self.spec else replace(model, spec=self.spec)
        self.model, self._state, self.last_used = model, ModelState.READY, time.monotonic()
        self.description = model.describe()
        self._monitor = asyncio.ensure_future(self._restart_after_crash(model))
        self._monitor.add_done_callback(report_defect)

    def _record_failure(self, error: BaseException) -> MillstreamError:
        """Set the state after a load that raised `error`; returns the error for its waiters."""
        if isinstance(error, MillstreamError) and not isinstance(error, ModelError):
            log.error("%s: %s", self.name, error.message)
            self._state = ModelState.UNLOADED  # no memory at present: the model itself is fine
            return error
        reason = describe(error)
        if isinstance(error, EngineDied):
            delay = self._restart_in = self._count_crash(reason)
            again = "" if delay is None else ". It is being loaded again; send the request again in a moment"
            retry = None if delay is None else math.ceil(delay)
            return EngineGone(f"the model {self.name!r} could not be loaded: {reason}{again}", retry_after=retry)
        log.error("%s: %s", self.name, reason, exc_info=None if isinstance(error, ModelError) else error)
        self._state, self.error = ModelState.FAILED, reason
        return EngineGone(f"the model {self.name!r} could not be loaded: {reason}", retry_after=None)

    async def _unload(self, model: ReadyModel, reason: str, grace: float | None, patience: float) -> None:
        """`grace`: None to wait for running requests without a limit, as long as the server runs."""
        try:
            ends = [asyncio.ensure_future(model.engine.drained()), asyncio.ensure_future(self._grace_over.wait())]
            await asyncio.wait(ends, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            reason = self._closed or reason  # requests that still run end because the server stops
            if not await model.engine.stop(reason, patience):
                log.error("%s: the engine hangs in a step and is abandoned", self.name)
                model.engine.disown(reason)
        finally:
            self._budget.release(self.name)
            self.leaving, self._state = None, ModelState.UNLOADED
        log.info("%s: unloaded: %s", self.name, reason)

    async def _restart_after_crash(self, model: ReadyModel) -> None:
        """Wait for the engine to end. If it crashed, load the model again, with exponential backoff."""
        cause = await model.engine.wait_gone()
        if self.model is None or self.model.engine is not model.engine or self._closed is not None:
            return
        self.model = None
        if model.engine.answered:
            self.crashes = 0
        if (delay := self._count_crash(cause or "the engine stopped")) is not None:
            self._begin_load(delay)

    def _count_crash(self, cause: str) -> float | None:
        """The engine has ended unasked. Returns the seconds after which it is loaded again; None if the model has
        failed, after too many crashes in a row."""
        self.crashes += 1
        if self.crashes >= MAX_CRASHES:
            self._budget.release(self.name)
            self._state = ModelState.FAILED
            self.error = f"its engine crashed {self.crashes} times without an answer; the last time: {cause}."
            log.error("%s: %s", self.name, self.error)
            return None
        delay: float = min(MAX_BACKOFF, FIRST_BACKOFF * 2 ** (self.crashes - 1))
        log.error("%s: %s; restarting in %.2f s", self.name, cause, delay)
        self.restarts += 1
        return delay


def report_defect(task: asyncio.Future[None]) -> None:
    """A done callback for tasks that are not awaited: logs their errors."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task of the hub failed", exc_info=error)
