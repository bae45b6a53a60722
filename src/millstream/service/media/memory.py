"""The memory budget for the media of all requests: fetched files, decoding, and prepared tensors.

Fetches and decodes wait for a reservation, first come, first served. Prepared tensors never wait: if they do not fit,
their request is refused. So nothing that holds memory waits for others that do, except for a decode, and one decode may
always run: there is no deadlock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from millstream.errors import EngineBusy, MediaRefused

RETRY_AFTER = 2
"""Seconds. A guess: how long an engine holds an image depends on the length of its output."""


@dataclass(slots=True)
class WorkLimit:
    """How much work of a kind may run at once, regardless of its memory. `limit` is None if there is no limit."""

    limit: int | None = None
    running: int = 0

    @property
    def full(self) -> bool:
        return self.limit is not None and self.running >= self.limit


@dataclass(slots=True, eq=False)
class _Waiter:
    work: WorkLimit
    size: int
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class MediaMemory:
    """All methods run on the event loop. The total is at most `limit` plus one file and its decoding."""

    def __init__(self, limit: int, *, image_decodes: int, av_decodes: int) -> None:
        """`image_decodes`, `av_decodes`: how many images, and videos or audio files, may be decoded at once."""
        self.limit = limit
        self.used = 0
        self.prepared = 0
        """The part of `used` that is tensors sent to engines."""
        self.fetches, self.image_decodes, self.av_decodes = WorkLimit(), WorkLimit(image_decodes), WorkLimit(av_decodes)
        self._decode_queue: deque[_Waiter] = deque()
        self._fetch_queue: deque[_Waiter] = deque()

    @property
    def waiting(self) -> int:
        return len(self._decode_queue) + len(self._fetch_queue)

    async def reserve(self, work: WorkLimit, size: int) -> Reservation:
        """Wait for `size` bytes. Drop the reservation when the work is done. Raises `MediaRefused` if `size` is over
        the whole budget."""
        if size > self.limit:
            raise MediaRefused(
                f"decoding this file takes about {_mib(size)}; this server has {_mib(self.limit)} for media "
                "(--media-memory). Send a smaller one"
            )
        queue = self._fetch_queue if work is self.fetches else self._decode_queue
        waiter = _Waiter(work, size)
        queue.append(waiter)
        self._grant()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.release(work, size)
            else:
                queue.remove(waiter)
                self._grant()
            raise
        return Reservation(self, work, size)

    def release(self, work: WorkLimit, size: int) -> None:
        work.running -= 1
        self.free(size)

    def free(self, size: int) -> None:
        self.used -= size
        self._grant()

    def check(self) -> None:
        """Before anything is fetched for a request: raises `EngineBusy` if its tensors could not be held."""
        if self.prepared >= self.limit:
            raise self._busy()

    def add_prepared(self, size: int, already: int) -> None:
        """Count tensors that an engine is sent. `already`: bytes counted for the same request. Raises `MediaRefused` if
        the request is over the whole budget, `EngineBusy` if it does not fit now."""
        if already + size > self.limit:
            raise MediaRefused(
                f"the media of this request take {_mib(already + size)} once they are prepared; this server has "
                f"{_mib(self.limit)} for media (--media-memory). Send fewer or smaller files, or ask for fewer choices",
                param="messages",
            )
        if self.prepared + size > self.limit:
            raise self._busy()
        self.prepared += size
        self.used += size

    def remove_prepared(self, size: int) -> None:
        self.prepared -= size
        self.free(size)

    def _busy(self) -> EngineBusy:
        return EngineBusy(
            f"the media of other requests take {_mib(self.prepared)} of {_mib(self.limit)} (--media-memory). Try again "
            f"in {RETRY_AFTER} s.",
            active=self.image_decodes.running + self.av_decodes.running,
            waiting=self.waiting,
            retry_after=RETRY_AFTER,
        )

    def _grant(self) -> None:
        """Decodes go first: when they end, they free memory that fetches wait for. A waiter that lacks memory blocks
        those behind it in its queue, so that small ones cannot starve it."""
        for waiter in _not_cancelled(self._decode_queue):
            if waiter.work.full:
                continue
            decoding = self.image_decodes.running or self.av_decodes.running
            if decoding and self.used + waiter.size > self.limit:
                return
            self._start(self._decode_queue, waiter)
        for waiter in _not_cancelled(self._fetch_queue):
            if self.fetches.running and self.used + waiter.size > self.limit:
                return
            self._start(self._fetch_queue, waiter)

    def _start(self, queue: deque[_Waiter], waiter: _Waiter) -> None:
        queue.remove(waiter)
        waiter.work.running += 1
        self.used += waiter.size
        waiter.granted.set_result(None)


class Reservation:
    """Bytes of the budget, freed when the last holder drops them: the task that reserved them, or a thread that works
    there."""

    def __init__(self, memory: MediaMemory, work: WorkLimit, size: int) -> None:
        self._memory = memory
        self._work = work
        self._size = size
        self._holders = 1

    def shrink(self, size: int) -> None:
        if size < self._size:
            freed, self._size = self._size - size, size
            self._memory.free(freed)

    def hold(self) -> None:
        self._holders += 1

    def drop(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._memory.release(self._work, self._size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()


def _not_cancelled(queue: deque[_Waiter]) -> list[_Waiter]:
    """A cancelled waiter stays in its queue until its task runs again; it can be granted nothing."""
    return [waiter for waiter in queue if not waiter.granted.cancelled()]


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
