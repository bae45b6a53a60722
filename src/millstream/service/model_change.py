"""A load or unload under way, as one task that any number of callers can wait for."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from millstream.errors import EngineGone, MillstreamError

log = logging.getLogger(__name__)


class ModelChange:
    """One task, many waiters. If the task is cancelled, its waiters get `error`, never a `CancelledError`, unless
    they are cancelled themselves."""

    def __init__(self, work: Coroutine[Any, Any, None], *, loads: bool, on_end: Callable[[ModelChange], None]) -> None:
        """`on_end` is called once, before any waiter resumes, even if the task is cancelled before its first step."""
        self.loads = loads
        self.error: MillstreamError | None = None
        self.cancelled = False
        self._on_end = on_end
        self._cancel_error: MillstreamError | None = None
        self._decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # In a context of its own: many requests may wait for it, so it belongs to none of them.
        self._task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        # The first callback of the task, so it runs before those of the waiters.
        self._task.add_done_callback(self._finish)

    def cancel(self, error: MillstreamError) -> bool:
        """Cancel the task; current waiters get `error` at once. Returns False if the task has already ended.

        Further calls do not cancel it again: that would interrupt the clean-up after the first.
        """
        if self._cancel_error is None and self._task.cancel():
            self._cancel_error = self.error = error
            self._decided.set_result(None)
        return self._cancel_error is not None

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until the task has ended, whatever its outcome; False if that takes longer than `seconds`."""
        await asyncio.wait([self._task], timeout=seconds)
        return self._task.done()

    async def join(self) -> None:
        """Wait for the end; raises if the change failed. A waiter that comes after `cancel` only waits: the
        change was not made for it."""
        if self._cancel_error is not None:
            await self.wait()
            return
        await asyncio.wait([self._decided])
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self.cancelled = task.cancelled()
        if self.cancelled:
            self.error = self._cancel_error or EngineGone("the load that this request waited for was cancelled")
        elif (error := task.exception()) is not None:
            if not isinstance(error, MillstreamError):
                log.error("a load or unload failed unexpectedly", exc_info=error)
                error = EngineGone(f"the model is not available: {type(error).__name__}: {error}")
            self.error = error
        self._on_end(self)
        if not self._decided.done():
            self._decided.set_result(None)
