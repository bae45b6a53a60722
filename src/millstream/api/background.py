"""Work that goes on after its request was answered. The server ends it when it shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from millstream.errors import Overloaded

MAX_TASKS = 256
"""Far more than an engine runs at once; each holds its request and its output in memory."""


class BackgroundTasks:
    """Owns tasks that no request waits for. Use it on one event loop."""

    def __init__(self, limit: int = MAX_TASKS) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Raises `Overloaded` if too many tasks run. `work` must handle its own errors."""
        if len(self._tasks) >= self._limit:
            work.close()
            raise Overloaded(f"{self._limit} background responses are running already. Try again in a moment.")
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancels all tasks, and returns once they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
