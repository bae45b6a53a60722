"""Races of loads and unloads: no waiter gets another's cancellation, and the model can always be loaded again."""

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
from support.hubs import FakeHub, last_of, on_loop

PHASES = ["before its first step", "in the pool", "waiting for memory", "before the engine", "in the engine's load"]


class HeldLoad:
    """A hub with a model "a" whose first load is held in a phase; later loads pass."""

    def __init__(self, phase: str) -> None:
        self.fake = FakeHub(memory=10)
        self.managed = self.fake.add("a", 10)
        self.phase = phase
        self.reached = asyncio.Event()
        self.release = threading.Event()
        self.gate = Gate()
        self._first = True
        if phase == "in the pool":
            self.fake.before_reserve = self._wait
        elif phase == "before the engine":
            self.fake.before_load = self._wait
        elif phase == "waiting for memory":
            self.fake.backends["other"] = lambda: FakeBackend(gate=self.gate)
            self.fake.add("other", 10)
            self.fake.before_reserve = self._mark
        elif phase == "in the engine's load":
            self.fake.backends["a"] = self._slow_backend
            self._loop = asyncio.get_running_loop()

    async def begin(self, count: int) -> list[asyncio.Future[object]]:
        """Start `count` requests that wait for the load, and wait until the load reaches its phase."""
        if self.phase == "waiting for memory":
            self.busy = await self.fake.begin("other")
        asking: list[asyncio.Future[object]] = [
            asyncio.ensure_future(self.fake.ask("a") if number else self.fake.hub.load("a")) for number in range(count)
        ]
        await asyncio.sleep(0)  # they wait now; the task of the load has not run
        assert self.managed.state == "loading"
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
async def test_an_unload_cancels_waiting_requests_but_not_the_next_load(phase: str) -> None:
    held = HeldLoad(phase)
    fake = held.fake
    asking = await held.begin(4)
    unloads = [asyncio.ensure_future(fake.hub.unload("a")) for _ in range(2)]
    await asyncio.sleep(0)
    # These come after the unload was requested and before it has ended.
    later: list[asyncio.Future[object]] = [asyncio.ensure_future(fake.ask("a"))]
    later.append(asyncio.ensure_future(fake.hub.load("a")))
    await asyncio.sleep(0)
    held.let_go()
    ends = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(end) for end in ends] == [LoadCancelled] * 4, ends
    assert all("send the request again to load it" in str(end) for end in ends)
    await asyncio.gather(*unloads)
    if phase == "waiting for memory":
        assert isinstance(await last_of(held.busy), Finished)
    for end in await asyncio.gather(*later):
        assert isinstance(end, Finished) or end.state == "ready"  # type: ignore[attr-defined]
    assert isinstance(await fake.ask("a"), Finished)
    assert fake.hub.memory.reserved == 10
    await fake.hub.unload("a")
    assert (fake.state("a"), fake.hub.memory.reserved, held.managed.in_use) == ("unloaded", 0, False)


@on_loop
async def test_an_unload_before_the_first_step_of_the_load() -> None:
    """The task is cancelled before its first step."""
    fake = FakeHub()
    fake.add("a")
    asking = asyncio.ensure_future(fake.ask("a"))
    await asyncio.sleep(0)
    assert (await fake.hub.unload("a")).state == "unloaded"
    assert fake.loads == []
    with pytest.raises(LoadCancelled):
        await asking
    assert isinstance(await fake.ask("a"), Finished)


@pytest.mark.parametrize("phase", PHASES)
@on_loop
async def test_shutdown_fails_requests_that_wait_for_a_load(phase: str) -> None:
    held = HeldLoad(phase)
    asking = await held.begin(3)
    closing = asyncio.ensure_future(held.fake.hub.close("closing time", 1.0, 5.0))
    await asyncio.sleep(0)
    held.let_go()
    ends = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(end, EngineGone) and end.message == "closing time" for end in ends), ends
    assert await closing


@on_loop
async def test_a_cancelled_waiter_does_not_affect_the_others() -> None:
    held = HeldLoad("before the engine")
    asking = await held.begin(3)
    asking[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    await held.fake.hub.unload("a")
    for each in asking[1:]:
        with pytest.raises(LoadCancelled):
            await each


@on_loop
async def test_concurrent_unloads_wait_for_the_same_end() -> None:
    fake = FakeHub()
    gate = Gate()
    fake.backends["a"] = lambda: FakeBackend(gate=gate)
    fake.add("a")
    inbox = await fake.begin("a")
    unloads = [asyncio.ensure_future(fake.hub.unload("a")) for _ in range(3)]
    await fake.until(lambda: fake.state("a") == "unloading")
    unloads.append(asyncio.ensure_future(fake.hub.unload("a")))
    gate.open()
    assert isinstance(await last_of(inbox), Finished)
    assert [card.state for card in await asyncio.gather(*unloads)] == ["unloaded"] * 4


@on_loop
async def test_an_engine_that_dies_as_its_unload_begins_is_not_restarted() -> None:
    fake = FakeHub()
    managed = fake.add("a")
    await fake.ask("a")
    assert managed.model is not None
    managed.model.engine.disown("it died")
    assert (await fake.hub.unload("a")).state == "unloaded"
    await asyncio.sleep(0)
    assert (fake.state("a"), managed.restarts, fake.loads) == ("unloaded", 0, ["a"])
    assert isinstance(await fake.ask("a"), Finished)


@on_loop
async def test_an_unload_cancels_a_pending_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed_model, "FIRST_BACKOFF", 100.0)
    fake = FakeHub()
    managed = fake.add("a")
    await fake.ask("a")
    assert managed.model is not None
    managed.model.engine.disown("it died")
    await fake.until(lambda: fake.state("a") == "loading")
    asking = asyncio.ensure_future(fake.ask("a"))
    await asyncio.sleep(0)
    assert (await fake.hub.unload("a")).state == "unloaded"
    with pytest.raises(LoadCancelled):
        await asking


class Panic(BaseException):
    """Not an Exception, like the panics of pyo3."""


@pytest.mark.parametrize("error", [IndexError("pop from empty list"), Panic("capacity overflow"), SystemExit(3)])
@pytest.mark.parametrize("source", ["loader", "backend"])
@on_loop
async def test_any_error_during_a_load_fails_the_model_with_a_reason(
    source: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeHub(memory=10)
    fake.add("a", 10)
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

    if source == "loader":
        fake.before_load = refuse
    else:
        fake.backends["a"] = backend
    with caplog.at_level(logging.ERROR):
        ends = await asyncio.gather(*(fake.ask("a") for _ in range(3)), return_exceptions=True)
    reason = f"{type(error).__name__}: {error}"
    assert all(isinstance(end, EngineGone) and reason in end.message and end.retry_after is None for end in ends), ends
    assert "Traceback" in caplog.text
    card = fake.hub.card("a")
    assert (card.state, card.error, card.reserved_bytes) == ("failed", reason, None)
    broken = False
    assert (await fake.hub.load("a")).state == "ready"


@on_loop
async def test_a_link_that_cannot_start_fails_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    fake = FakeHub()
    fake.add("a")
    monkeypatch.setattr(OwnerThreads, "start", refuse)
    with pytest.raises(EngineGone, match="can't start new thread"):
        await fake.ask("a")
    assert fake.state("a") == "failed"
