"""The memory budget: reservations, and which models are evicted for them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import EngineBusy, InsufficientMemory
from millstream.service.memory_budget import MemoryBudget, Reservation, models_to_evict
from support.hubs import on_loop

reservations = st.lists(
    st.builds(
        Reservation,
        name=st.uuids().map(str),
        size=st.integers(1, 50),
        last_used=st.floats(0, 100),
        pinned=st.booleans(),
        in_use=st.booleans(),
    ),
    max_size=8,
)


@given(reservations, st.integers(0, 200))
def test_idle_unpinned_models_are_evicted_oldest_first_and_no_more_than_needed(
    loaded: list[Reservation], missing: int
) -> None:
    chosen = models_to_evict(loaded, missing)
    idle = [each for each in loaded if not each.pinned and not each.in_use]
    if chosen is None:
        assert sum(each.size for each in idle) < missing
        return
    evicted = [next(each for each in loaded if each.name == name) for name in chosen]
    assert all(each in idle for each in evicted)
    assert sum(each.size for each in evicted) >= missing
    assert sum(each.size for each in evicted[:-1]) < missing or not evicted
    remaining = [each.last_used for each in idle if each not in evicted]
    assert all(each.last_used <= other for each in evicted for other in remaining)


class Models:
    """The models that share a budget."""

    def __init__(self) -> None:
        self.reservations: dict[str, Reservation] = {}
        self.unloaded: list[str] = []
        self.budget = MemoryBudget(
            100, reservations=lambda: list(self.reservations.values()), unload=self._unload, patience=0.05
        )

    async def has(
        self, name: str, size: int, *, last_used: float = 0, pinned: bool = False, in_use: bool = False
    ) -> None:
        assert await self.budget.reserve(name, size, size) == size
        self.reservations[name] = Reservation(name, size, last_used, pinned, in_use)

    async def _unload(self, name: str) -> None:
        self.unloaded.append(name)
        del self.reservations[name]
        self.budget.release(name)


@on_loop
async def test_a_reservation_is_limited_to_the_free_memory() -> None:
    models = Models()
    assert await models.budget.reserve("a", 10, 70) == 70
    assert await models.budget.reserve("b", 10, 70) == 30
    assert models.budget.reserved == 100


@on_loop
async def test_without_a_limit_everything_fits() -> None:
    budget = MemoryBudget(None, reservations=list, unload=lambda name: pytest.fail(name))
    assert await budget.reserve("a", 10**15, 10**16) == 10**16


@on_loop
async def test_the_oldest_idle_models_are_evicted() -> None:
    models = Models()
    await models.has("new", 30, last_used=3)
    await models.has("old", 30, last_used=1)
    await models.has("busy", 30, last_used=0, in_use=True)
    assert await models.budget.reserve("x", 40, 40) == 40
    assert models.unloaded == ["old"]


@on_loop
async def test_a_model_that_can_never_fit_is_refused_before_any_eviction() -> None:
    models = Models()
    await models.has("idle", 30)
    with pytest.raises(InsufficientMemory, match="Nothing was unloaded") as refused:
        await models.budget.reserve("x", 101, 101)
    assert refused.value.status == 507
    await models.has("pinned", 60, pinned=True)
    with pytest.raises(InsufficientMemory, match=r"pinned models \(pinned\) hold"):
        await models.budget.reserve("x", 50, 50)
    assert models.unloaded == []


@on_loop
async def test_a_reservation_waits_for_models_in_use_until_a_timeout() -> None:
    models = Models()
    await models.has("busy", 90, in_use=True)
    models.reservations["unloaded"] = Reservation("unloaded", 0, 0, False, False)
    with pytest.raises(EngineBusy, match=r"other models are in use \(busy\)"):
        await models.budget.reserve("x", 50, 50)
    waiting = asyncio.ensure_future(models.budget.reserve("x", 50, 50))
    await asyncio.sleep(0)
    models.reservations["busy"] = Reservation("busy", 90, 0, False, False)
    models.budget.notify()
    assert await waiting == 50
    assert models.unloaded == ["busy"]


@on_loop
async def test_two_loads_do_not_count_on_the_same_bytes() -> None:
    models = Models()
    first, second = await asyncio.gather(
        models.budget.reserve("a", 60, 60), models.budget.reserve("b", 60, 60), return_exceptions=True
    )
    assert first == 60
    assert isinstance(second, EngineBusy)
    assert models.budget.reserved == 60
