"""A budget of memory for the media of all requests: files as they came, decoding, and what engines are given.

Files and decoders wait for their share, first come, first served. What is ready for an engine never waits: when it does
not fit, its request is refused. So nobody who holds memory waits for others who do, but for decoders, and one decoder
may always run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from millstream.errors import EngineBusy, MediaRefused

RETRY_AFTER = 2
"""Seconds. A guess: how long an engine has an image depends on the length of its answer."""


@dataclass(slots=True)
class Stage:
    """A kind of work. `most`: how many at once, whatever they take."""

    most: int | None = None
    running: int = 0

    @property
    def full(self) -> bool:
        return self.most is not None and self.running >= self.most


@dataclass(slots=True, eq=False)
class _Waiting:
    stage: Stage
    size: int
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class MediaMemory:
    """All methods run on the event loop. The total is at most `limit`, and one file and its decoding."""

    def __init__(self, limit: int, *, images: int, others: int) -> None:
        """`images`, `others`: how many may be decoded at once."""
        self.limit = limit
        self.used = 0
        self.kept = 0
        """Of what is used, what engines are given."""
        self.files, self.images, self.others = Stage(), Stage(images), Stage(others)
        self._decoders: deque[_Waiting] = deque()
        self._arriving: deque[_Waiting] = deque()

    @property
    def waiting(self) -> int:
        return len(self._decoders) + len(self._arriving)

    async def share(self, stage: Stage, size: int) -> Share:
        """Wait for so many bytes. To be dropped when the work is done. Raises `MediaRefused` for what can never be."""
        if size > self.limit:
            raise MediaRefused(
                f"to decode this file takes about {_mib(size)}; this server has {_mib(self.limit)} for media "
                "(--media-memory). Send a smaller one"
            )
        line = self._arriving if stage is self.files else self._decoders
        place = _Waiting(stage, size)
        line.append(place)
        self._grant()
        try:
            await place.granted
        except asyncio.CancelledError:
            if place.granted.done() and not place.granted.cancelled():
                self.give_back(stage, size)
            else:
                line.remove(place)
                self._grant()
            raise
        return Share(self, stage, size)

    def give_back(self, stage: Stage, size: int) -> None:
        stage.running -= 1
        self.free(size)

    def free(self, size: int) -> None:
        self.used -= size
        self._grant()

    def check(self) -> None:
        """Refuse a request before anything is fetched for it that could not be kept."""
        if self.kept >= self.limit:
            raise self._busy()

    def keep(self, size: int, already: int) -> None:
        """Count what an engine is given. `already`: what is kept for the same request. Raises if it does not fit."""
        if already + size > self.limit:
            raise MediaRefused(
                f"the media of this request take {_mib(already + size)} once they are prepared; this server has "
                f"{_mib(self.limit)} for media (--media-memory). Send fewer or smaller ones, or ask for fewer answers",
                param="messages",
            )
        if self.kept + size > self.limit:
            raise self._busy()
        self.kept += size
        self.used += size

    def forget(self, size: int) -> None:
        self.kept -= size
        self.free(size)

    def _busy(self) -> EngineBusy:
        return EngineBusy(
            f"the media of other requests take {_mib(self.kept)} of {_mib(self.limit)} (--media-memory). Try again in "
            f"{RETRY_AFTER} s.",
            active=self.images.running + self.others.running,
            waiting=self.waiting,
            retry_after=RETRY_AFTER,
        )

    def _grant(self) -> None:
        """Decoders first: they end, and free what waits for them. Who lacks memory is overtaken by none of its line."""
        for place in list(self._decoders):
            if place.stage.full:
                continue
            alone = not (self.images.running or self.others.running)
            if not alone and self.used + place.size > self.limit:
                return
            self._enter(self._decoders, place)
        for place in list(self._arriving):
            if self.files.running and self.used + place.size > self.limit:
                return
            self._enter(self._arriving, place)

    def _enter(self, line: deque[_Waiting], place: _Waiting) -> None:
        line.remove(place)
        place.stage.running += 1
        self.used += place.size
        place.granted.set_result(None)


class Share:
    """Some of the memory. It is free when nobody holds it: neither who asked for it nor a thread that works there."""

    def __init__(self, memory: MediaMemory, stage: Stage, size: int) -> None:
        self._memory = memory
        self._stage = stage
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
            self._memory.give_back(self._stage, self._size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
