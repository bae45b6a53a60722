"""Loads and unloads that race: no waiter sees another's cancellation, and the model can always be loaded again."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from millstream.engine.messages import Finished
from millstream.engine.owner_threads import OwnerThreads
from millstream.errors import EngineGone, LoadCancelled
from millstream.service import managed_model
from support.fake import FakeBackend, Gate
from support.hubs import Yard, last_of, on_loop

PHASES = ["before its first step", "in the pool", "in make_room", "before the engine", "in the engine's load"]


class Held:
    """A yard with a model "a" whose first load is held in a phase; later loads pass."""

    def __init__(self, phase: str) -> None:
        self.yard = Yard(memory=10)
        self.entry = self.yard.add("a", 10)
        self.phase = phase
        self.reached = asyncio.Event()
        self.release = threading.Event()
        self.gate = Gate()
        self._first = True
        if phase == "in the pool":
            self.yard.before_room = self._wait
        elif phase == "before the engine":
            self.yard.before_load = self._wait
        elif phase == "in make_room":
            self.yard.backends["other"] = lambda: FakeBackend(gate=self.gate)
            self.yard.add("other", 10)
            self.yard.before_room = self._mark
        elif phase == "in the engine's load":
            self.yard.backends["a"] = self._slow_backend
            self._loop = asyncio.get_running_loop()

    async def begin(self, count: int) -> list[asyncio.Future[object]]:
        """That many requests wait for the load, and the load has come as far as its phase."""
        if self.phase == "in make_room":
            self.busy = await self.yard.begin("other")
        asking: list[asyncio.Future[object]] = [
            asyncio.ensure_future(self.yard.ask("a") if number else self.yard.hub.load("a")) for number in range(count)
        ]
        await asyncio.sleep(0)  # they wait now, and the load's task has not run
        assert self.entry.state == "loading"
        if self.phase != "before its first step":
            await self.reached.wait()
            await asyncio.sleep(0)
        return asking

    def let_go(self) -> None:
        self.release.set()
        self.gate.open()

    async def _wait(self, name: str) -> None:
        if self._first:
            self._first = False
            self.reached.set()
            await asyncio.Event().wait()

    async def _mark(self, name: str) -> None:
        if name == "a":
            self.reached.set()

    def _slow_backend(self) -> FakeBackend:
        backend = FakeBackend()
        if self._first:
            self._first = False
            backend.on_load = self._block
        return backend

    def _block(self) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self.release.wait(20)


@pytest.mark.parametrize("phase", PHASES)
@on_loop
async def test_an_unload_tells_those_who_wait_and_the_next_load_is_not_touched(phase: str) -> None:
    held = Held(phase)
    yard = held.yard
    asking = await held.begin(4)
    unloads = [asyncio.ensure_future(yard.hub.unload("a")) for _ in range(2)]
    await asyncio.sleep(0)
    # These come after the unload was asked for and before it is over.
    late: list[asyncio.Future[object]] = [asyncio.ensure_future(yard.ask("a"))]
    late.append(asyncio.ensure_future(yard.hub.load("a")))
    await asyncio.sleep(0)
    held.let_go()
    ends = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(end) for end in ends] == [LoadCancelled] * 4, ends
    assert all("ask again to load it" in str(end) for end in ends)
    await asyncio.gather(*unloads)
    if phase == "in make_room":
        assert isinstance(await last_of(held.busy), Finished)
    for end in await asyncio.gather(*late):
        assert isinstance(end, Finished) or end.state == "ready"  # type: ignore[attr-defined]
    assert isinstance(await yard.ask("a"), Finished)
    assert yard.hub.room.held == 10
    await yard.hub.unload("a")
    assert (yard.state("a"), yard.hub.room.held, held.entry.in_use) == ("unloaded", 0, False)


@on_loop
async def test_an_unload_in_the_same_turn_as_the_load() -> None:
    """The task is cancelled before its first step."""
    yard = Yard()
    yard.add("a")
    asking = asyncio.ensure_future(yard.ask("a"))
    await asyncio.sleep(0)
    assert (await yard.hub.unload("a")).state == "unloaded"
    assert yard.loads == []
    with pytest.raises(LoadCancelled):
        await asking
    assert isinstance(await yard.ask("a"), Finished)


@pytest.mark.parametrize("phase", PHASES)
@on_loop
async def test_the_end_of_the_server_tells_those_who_wait(phase: str) -> None:
    held = Held(phase)
    asking = await held.begin(3)
    closing = asyncio.ensure_future(held.yard.hub.close("closing time", 1.0, 5.0))
    await asyncio.sleep(0)
    held.let_go()
    ends = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(end, EngineGone) and end.message == "closing time" for end in ends), ends
    assert await closing


@on_loop
async def test_a_waiter_that_leaves_takes_nobody_with_it() -> None:
    held = Held("before the engine")
    asking = await held.begin(3)
    asking[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    await held.yard.hub.unload("a")
    for each in asking[1:]:
        with pytest.raises(LoadCancelled):
            await each


@on_loop
async def test_an_unload_of_a_model_that_is_leaving_waits_for_the_same_end() -> None:
    yard = Yard()
    gate = Gate()
    yard.backends["a"] = lambda: FakeBackend(gate=gate)
    yard.add("a")
    inbox = await yard.begin("a")
    leaving = [asyncio.ensure_future(yard.hub.unload("a")) for _ in range(3)]
    await yard.until(lambda: yard.state("a") == "unloading")
    leaving.append(asyncio.ensure_future(yard.hub.unload("a")))
    gate.open()
    assert isinstance(await last_of(inbox), Finished)
    assert [card.state for card in await asyncio.gather(*leaving)] == ["unloaded"] * 4


@on_loop
async def test_an_engine_that_dies_as_its_unload_begins_is_not_started_again() -> None:
    yard = Yard()
    entry = yard.add("a")
    await yard.ask("a")
    assert entry.model is not None
    entry.model.engine.disown("it died")
    assert (await yard.hub.unload("a")).state == "unloaded"
    await asyncio.sleep(0)
    assert (yard.state("a"), entry.restarts, yard.loads) == ("unloaded", 0, ["a"])
    assert isinstance(await yard.ask("a"), Finished)


@on_loop
async def test_an_unload_ends_the_wait_of_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed_model, "FIRST_BACKOFF", 100.0)
    yard = Yard()
    entry = yard.add("a")
    await yard.ask("a")
    assert entry.model is not None
    entry.model.engine.disown("it died")
    await yard.until(lambda: yard.state("a") == "loading")
    asking = asyncio.ensure_future(yard.ask("a"))
    await asyncio.sleep(0)
    assert (await yard.hub.unload("a")).state == "unloaded"
    with pytest.raises(LoadCancelled):
        await asking


class Panic(BaseException):
    """As pyo3 raises it: no Exception."""


@pytest.mark.parametrize("error", [IndexError("pop from empty list"), Panic("capacity overflow"), SystemExit(3)])
@pytest.mark.parametrize("place", ["opener", "backend"])
@on_loop
async def test_whatever_is_raised_while_opening_is_a_failed_model_with_a_reason(
    place: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    yard = Yard(memory=10)
    yard.add("a", 10)
    broken = True

    async def refuse(name: str) -> None:
        if broken:
            raise error

    def backend() -> FakeBackend:
        made = FakeBackend()

        def refuse_here() -> None:
            if broken:
                raise error

        made.on_load = refuse_here
        return made

    if place == "opener":
        yard.before_load = refuse
    else:
        yard.backends["a"] = backend
    with caplog.at_level(logging.ERROR):
        ends = await asyncio.gather(*(yard.ask("a") for _ in range(3)), return_exceptions=True)
    reason = f"{type(error).__name__}: {error}"
    assert all(isinstance(end, EngineGone) and reason in end.message and end.retry_after is None for end in ends), ends
    assert "Traceback" in caplog.text
    card = yard.hub.card("a")
    assert (card.state, card.error, card.reserved_bytes) == ("failed", reason, None)
    broken = False
    assert (await yard.hub.load("a")).state == "ready"


@on_loop
async def test_a_link_that_cannot_start_is_a_failed_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    yard = Yard()
    yard.add("a")
    monkeypatch.setattr(OwnerThreads, "start", refuse)
    with pytest.raises(EngineGone, match="can't start new thread"):
        await yard.ask("a")
    assert yard.state("a") == "failed"
