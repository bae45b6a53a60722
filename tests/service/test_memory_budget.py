"""Who gets memory, and who has to leave for it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import EngineBusy, InsufficientMemory
from millstream.service.memory_budget import Holder, MemoryBudget, victims
from support.hubs import on_loop

holders = st.lists(
    st.builds(
        Holder,
        name=st.uuids().map(str),
        size=st.integers(1, 50),
        last_used=st.floats(0, 100),
        pinned=st.booleans(),
        in_use=st.booleans(),
    ),
    max_size=8,
)


@given(holders, st.integers(0, 200))
def test_victims_are_idle_unpinned_oldest_first_and_no_more_than_needed(inside: list[Holder], missing: int) -> None:
    chosen = victims(inside, missing)
    free = [each for each in inside if not each.pinned and not each.in_use]
    if chosen is None:
        assert sum(each.size for each in free) < missing
        return
    leaving = [next(each for each in inside if each.name == name) for name in chosen]
    assert all(each in free for each in leaving)
    assert sum(each.size for each in leaving) >= missing
    assert sum(each.size for each in leaving[:-1]) < missing or not leaving
    staying = [each.last_used for each in free if each not in leaving]
    assert all(each.last_used <= other for each in leaving for other in staying)


class Others:
    """The models that a room knows of."""

    def __init__(self) -> None:
        self.holders: dict[str, Holder] = {}
        self.unloaded: list[str] = []
        self.room = MemoryBudget(100, holders=lambda: list(self.holders.values()), unload=self._unload, patience=0.05)

    async def has(
        self, name: str, size: int, *, last_used: float = 0, pinned: bool = False, in_use: bool = False
    ) -> None:
        assert await self.room.take(name, size, size) == size
        self.holders[name] = Holder(name, size, last_used, pinned, in_use)

    async def _unload(self, name: str) -> None:
        self.unloaded.append(name)
        del self.holders[name]
        self.room.give_back(name)


@on_loop
async def test_it_gives_what_is_wanted_or_what_is_free() -> None:
    others = Others()
    assert await others.room.take("a", 10, 70) == 70
    assert await others.room.take("b", 10, 70) == 30
    assert others.room.held == 100


@on_loop
async def test_without_a_budget_everything_fits() -> None:
    room = MemoryBudget(None, holders=list, unload=lambda name: pytest.fail(name))
    assert await room.take("a", 10**15, 10**16) == 10**16


@on_loop
async def test_the_oldest_idle_ones_leave() -> None:
    others = Others()
    await others.has("new", 30, last_used=3)
    await others.has("old", 30, last_used=1)
    await others.has("busy", 30, last_used=0, in_use=True)
    assert await others.room.take("x", 40, 40) == 40
    assert others.unloaded == ["old"]


@on_loop
async def test_what_can_never_fit_is_refused_before_anything_leaves() -> None:
    others = Others()
    await others.has("idle", 30)
    with pytest.raises(InsufficientMemory, match="Nothing was unloaded") as refused:
        await others.room.take("x", 101, 101)
    assert refused.value.status == 507
    await others.has("pinned", 60, pinned=True)
    with pytest.raises(InsufficientMemory, match="pinned hold"):
        await others.room.take("x", 50, 50)
    assert others.unloaded == []


@on_loop
async def test_it_waits_for_models_in_use_and_says_so_in_the_end() -> None:
    others = Others()
    await others.has("busy", 90, in_use=True)
    with pytest.raises(EngineBusy, match="busy are in use"):
        await others.room.take("x", 50, 50)
    waiting = asyncio.ensure_future(others.room.take("x", 50, 50))
    await asyncio.sleep(0)
    others.holders["busy"] = Holder("busy", 90, 0, False, False)
    others.room.changed()
    assert await waiting == 50
    assert others.unloaded == ["busy"]


@on_loop
async def test_two_loads_do_not_count_on_the_same_bytes() -> None:
    others = Others()
    first, second = await asyncio.gather(
        others.room.take("a", 60, 60), others.room.take("b", 60, 60), return_exceptions=True
    )
    assert first == 60
    assert isinstance(second, EngineBusy)
    assert others.room.held == 60
