"""The memory that models share: who gets how much, and who has to leave for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from millstream.errors import EngineBusy, InsufficientMemory

PATIENCE = 60.0
"""Seconds that a load waits for models in use to become idle."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A model that has memory, as far as making room is concerned."""

    name: str
    size: int
    last_used: float
    pinned: bool
    in_use: bool


def victims(holders: Sequence[Holder], missing: int) -> list[str] | None:
    """Who leaves so that `missing` bytes become free: the least recently used that nobody uses. None: not enough."""
    leaving: list[str] = []
    idle = [holder for holder in holders if not holder.pinned and not holder.in_use]
    for holder in sorted(idle, key=lambda each: each.last_used):
        if missing <= 0:
            break
        leaving.append(holder.name)
        missing -= holder.size
    return leaving if missing <= 0 else None


class MemoryBudget:
    """`total` bytes for all models; None: no bound. A model holds what it was granted until it gives it back."""

    def __init__(
        self,
        total: int | None,
        *,
        holders: Callable[[], Sequence[Holder]],
        unload: Callable[[str], Awaitable[None]],
        patience: float = PATIENCE,
    ) -> None:
        self.total = total
        self._held: dict[str, int] = {}
        self._holders = holders
        self._unload = unload
        self._patience = patience
        self._changed = asyncio.Event()
        self._deciding = asyncio.Lock()

    def held_by(self, name: str) -> int:
        return self._held.get(name, 0)

    @property
    def held(self) -> int:
        return sum(self._held.values())

    async def take(self, name: str, least: int, want: int) -> int:
        """Reserve between `least` and `want` bytes, unloading others if need be; how many it is.

        Raises `InsufficientMemory` before anything is unloaded if it can never fit, `EngineBusy` if too much is in use.
        """
        if self.total is None:
            return want
        self._refuse_hopeless(name, least)
        try:
            async with asyncio.timeout(self._patience):
                while not await self._try(name, least, want):
                    await self._changed.wait()
        except TimeoutError:
            used = ", ".join(holder.name for holder in self._others(name))
            raise EngineBusy(
                f"no memory for {name!r}: {used} are in use. It needs {gib(least)} of {gib(self.total)}. Try again.",
                active=len(self._held),
                waiting=0,
                retry_after=5,
            ) from None
        return self._held[name]

    def give_back(self, name: str) -> None:
        if self._held.pop(name, None) is not None:
            self.changed()

    def changed(self) -> None:
        """A model became idle or left: whoever waits for room should look again."""
        self._changed.set()

    async def _try(self, name: str, least: int, want: int) -> bool:
        """One decision at a time, so that two loads do not both count on the same free bytes."""
        assert self.total is not None
        async with self._deciding:
            self._changed.clear()
            free = self.total - sum(size for other, size in self._held.items() if other != name)
            if free < least:
                leaving = victims(self._others(name), least - free)
                if leaving is None:
                    return False
                for other in leaving:
                    await self._unload(other)
                free = self.total - sum(size for other, size in self._held.items() if other != name)
            if free < least:
                return False
            self._held[name] = min(want, free)
            return True

    def _others(self, name: str) -> list[Holder]:
        return [holder for holder in self._holders() if holder.name != name]

    def _refuse_hopeless(self, name: str, least: int) -> None:
        assert self.total is not None
        pinned = [holder for holder in self._others(name) if holder.pinned]
        available = self.total - sum(holder.size for holder in pinned)
        if least <= available:
            return
        why = f"the budget is {gib(self.total)} (--memory)"
        if pinned:
            why += (
                f", of which {', '.join(holder.name for holder in pinned)} hold {gib(self.total - available)} for good"
            )
        raise InsufficientMemory(f"the model {name!r} needs at least {gib(least)}; {why}. Nothing was unloaded for it.")


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
