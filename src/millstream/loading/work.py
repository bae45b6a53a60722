"""Runs the blocking work of loaders on the pool, and knows what is still running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE = 2.0
"""How long the server's shutdown waits for blocking work of cancelled loads: a download ends its child process."""


class Work:
    def __init__(self, pool: Executor) -> None:
        self.pool = pool
        self._jobs: set[Future[Any]] = set()
        """Jobs on the pool, including those of cancelled loads."""

    @property
    def running(self) -> bool:
        """True if a download or another blocking job is still running."""
        return any(future.running() for future in list(self._jobs))

    async def close(self) -> None:
        """Waits a moment for what is running."""
        if jobs := [asyncio.wrap_future(job) for job in list(self._jobs)]:
            await asyncio.wait([asyncio.gather(*jobs, return_exceptions=True)], timeout=PATIENCE)

    async def __call__(self, work: Callable[[], T]) -> T:
        future = self.pool.submit(work)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        return await asyncio.wrap_future(future)
