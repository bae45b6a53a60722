"""The threads of a server, one pool for each kind of work: none holds up what only waits for another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

WORK_THREADS = 4
NETWORK_THREADS = 16
"""Concurrent media downloads, and concurrent DNS lookups."""
JOIN_THREADS = 32
"""Engines that are waited for at the same time, as they end."""


class Pools:
    def __init__(self) -> None:
        self.work = ThreadPoolExecutor(WORK_THREADS, thread_name_prefix="prepare")
        """For the CPU and for files of this machine: prompts, images, tokenizers."""
        self.network = ThreadPoolExecutor(NETWORK_THREADS, thread_name_prefix="fetch")
        """Waits for the machines that clients name."""
        self.dns = ThreadPoolExecutor(NETWORK_THREADS, thread_name_prefix="dns")
        self.joins = ThreadPoolExecutor(JOIN_THREADS, thread_name_prefix="join")
        """The event loop's own, of `asyncio.to_thread`. Its waits have limits."""
        self.waits = OwnThreads()
        """Waits for model hubs, and for the start and end of child processes."""

    def close(self) -> None:
        """Idle threads end now, and queued work is dropped. What runs ends when it ends."""
        for pool in (self.work, self.network, self.dns, self.joins):
            pool.shutdown(wait=False, cancel_futures=True)


class OwnThreads(Executor):
    """Gives each job a thread of its own, so that one that hangs holds up no other. For waits, of which there are few:
    threads that compute would only share the cores."""

    def submit(self, work: Callable[..., T], /, *arguments: Any, **options: Any) -> Future[T]:
        pool = ThreadPoolExecutor(1, thread_name_prefix="wait")
        future = pool.submit(work, *arguments, **options)
        pool.shutdown(wait=False)  # the thread ends with the job
        return future
