"""A load or an unload under way, and how those who wait for it learn its outcome."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from millstream.errors import EngineGone, MillstreamError

log = logging.getLogger(__name__)


class ModelChange:
    """One task, many waiters. A waiter never sees a `CancelledError` but its own: it gets `error` instead."""

    def __init__(self, work: Coroutine[Any, Any, None], *, loads: bool, ended: Callable[[ModelChange], None]) -> None:
        """`ended` is called once, before any waiter goes on; also if the task is cancelled before its first step."""
        self.loads = loads
        self.error: MillstreamError | None = None
        self.cancelled = False
        self._ended = ended
        self._given_up: MillstreamError | None = None
        self._decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(work)
        # The first callback of the task: those of the waiters run after it.
        self._task.add_done_callback(self._note)

    def give_up(self, why: MillstreamError) -> bool:
        """Cancel the task; those who wait already get `why`, now. False if it is too late for that.

        It is cancelled once, however often this is called: a second cancel would interrupt the clean-up of the first.
        """
        if self._given_up is None and self._task.cancel():
            self._given_up = self.error = why
            self._decided.set_result(None)
        return self._given_up is not None

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end, however it ends; true if it has come."""
        await asyncio.wait([self._task], timeout=seconds)
        return self._task.done()

    async def join(self) -> None:
        """Wait for the end and raise what went wrong. Whoever comes after `give_up` only waits: it was not theirs."""
        if self._given_up is not None:
            await self.wait()
            return
        await asyncio.wait([self._decided])
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _note(self, task: asyncio.Task[None]) -> None:
        self.cancelled = task.cancelled()
        if self.cancelled:
            self.error = self._given_up or EngineGone("what this request waited for was cancelled")
        elif (error := task.exception()) is not None:
            if not isinstance(error, MillstreamError):
                log.error("a load or unload failed unexpectedly", exc_info=error)
                error = EngineGone(f"the model is not available: {type(error).__name__}: {error}")
            self.error = error
        self._ended(self)
        if not self._decided.done():
            self._decided.set_result(None)
