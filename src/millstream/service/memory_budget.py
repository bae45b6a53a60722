"""The memory budget that models share: reserves memory for a load, and evicts idle models to free it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from millstream.errors import EngineBusy, InsufficientMemory

PATIENCE = 60.0
"""Seconds that a load waits for models in use to become idle."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The memory of one model, and what decides whether it may be evicted."""

    name: str
    size: int
    last_used: float
    pinned: bool
    in_use: bool


def models_to_evict(reservations: Sequence[Reservation], missing: int) -> list[str] | None:
    """The idle models whose eviction frees `missing` bytes, least recently used first. Returns None if all of them
    together do not."""
    evicted: list[str] = []
    candidates = [each for each in reservations if not each.pinned and not each.in_use]
    for candidate in sorted(candidates, key=lambda each: each.last_used):
        if missing <= 0:
            break
        evicted.append(candidate.name)
        missing -= candidate.size
    return evicted if missing <= 0 else None


class MemoryBudget:
    """`total` bytes for all models; None: no limit. A reservation lasts until it is released."""

    def __init__(
        self,
        total: int | None,
        *,
        reservations: Callable[[], Sequence[Reservation]],
        unload: Callable[[str], Awaitable[None]],
        patience: float = PATIENCE,
    ) -> None:
        self.total = total
        self._reserved: dict[str, int] = {}
        self._reservations = reservations
        self._unload = unload
        self._patience = patience
        self._changed = asyncio.Event()
        self._deciding = asyncio.Lock()

    def reserved_by(self, name: str) -> int:
        return self._reserved.get(name, 0)

    @property
    def reserved(self) -> int:
        return sum(self._reserved.values())

    async def reserve(self, name: str, minimum: int, wanted: int) -> int:
        """Reserve between `minimum` and `wanted` bytes, evicting idle models if needed; returns the number of bytes.

        Raises `InsufficientMemory`, before anything is evicted, if the model can never fit. Raises `EngineBusy` if
        other models stay in use for too long.
        """
        if self.total is None:
            return wanted
        self._check_possible(name, minimum)
        try:
            async with asyncio.timeout(self._patience):
                while not await self._try_reserve(name, minimum, wanted):
                    await self._changed.wait()
        except TimeoutError:
            others = ", ".join(other.name for other in self._others(name) if other.size)
            raise EngineBusy(
                f"no memory to load {name!r}: it needs {gib(minimum)} of {gib(self.total)}, and other models "
                f"are in use ({others}). Try again later.",
                active=len(self._reserved),
                waiting=0,
                retry_after=5,
            ) from None
        return self._reserved[name]

    def release(self, name: str) -> None:
        if self._reserved.pop(name, None) is not None:
            self.notify()

    def notify(self) -> None:
        """A model became idle or was unloaded: loads that wait for memory try again."""
        self._changed.set()

    async def _try_reserve(self, name: str, minimum: int, wanted: int) -> bool:
        """One at a time, so that two loads do not both count on the same free bytes."""
        assert self.total is not None
        async with self._deciding:
            self._changed.clear()
            free = self.total - sum(size for other, size in self._reserved.items() if other != name)
            if free < minimum:
                evicted = models_to_evict(self._others(name), minimum - free)
                if evicted is None:
                    return False
                for other in evicted:
                    await self._unload(other)
                free = self.total - sum(size for other, size in self._reserved.items() if other != name)
            if free < minimum:
                return False
            self._reserved[name] = min(wanted, free)
            return True

    def _others(self, name: str) -> list[Reservation]:
        return [each for each in self._reservations() if each.name != name]

    def _check_possible(self, name: str, minimum: int) -> None:
        """Raises InsufficientMemory if the model would not fit even with all unpinned models unloaded."""
        assert self.total is not None
        pinned = [other for other in self._others(name) if other.pinned]
        available = self.total - sum(other.size for other in pinned)
        if minimum <= available:
            return
        limit = f"the budget is {gib(self.total)} (--memory)"
        if pinned:
            names = ", ".join(other.name for other in pinned)
            limit += f", of which pinned models ({names}) hold {gib(self.total - available)}"
        raise InsufficientMemory(f"the model {name!r} needs at least {gib(minimum)}; {limit}. Nothing was unloaded.")


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
