"""Runs the blocking work of loaders on a pool, and waits for it at the end."""

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
        self._pool = pool
        self._jobs: set[Future[Any]] = set()
        """Jobs on the pool, including those of cancelled loads."""

    async def close(self) -> None:
        """Waits a moment for what is running."""
        if jobs := [asyncio.wrap_future(job) for job in list(self._jobs)]:
            await asyncio.wait([asyncio.gather(*jobs, return_exceptions=True)], timeout=PATIENCE)

    async def __call__(self, work: Callable[[], T]) -> T:
        future = self._pool.submit(work)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        return await asyncio.wrap_future(future)
