"""Models are loaded on demand, evicted for others, unloaded when idle, and restarted after a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from millstream.engine.generation.plan import Plan, StepResult
from millstream.engine.messages import Failed, Finished
from millstream.errors import EngineDied, EngineGone, InsufficientMemory, LoadCancelled, ModelError, NotFound
from millstream.model_facts import LoadProgress
from millstream.service import managed_model
from millstream.service.ready_model import ReadyModel
from support.fake import FakeBackend, Gate
from support.hubs import FakeHub, last_of, on_loop


class Crashing(FakeBackend):
    """Its engine crashes in the first step."""

    def step(self, plan: Plan) -> StepResult:
        raise SystemExit("the engine crashes")


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed_model, "FIRST_BACKOFF", 0.001)


@on_loop
async def test_concurrent_requests_share_one_load() -> None:
    fake = FakeHub()
    fake.add("a")
    assert fake.state("a") == "unloaded"
    ends = await asyncio.gather(*(fake.ask("a") for _ in range(100)))
    assert all(isinstance(end, Finished) for end in ends)
    assert fake.loads == ["a"]


@on_loop
async def test_models_are_found_by_name_and_alias() -> None:
    fake = FakeHub()
    fake.add("org/a", aliases=("gpt-4o", "a"))
    fake.add("b")
    for name in ("org/a", "gpt-4o", "a", ""):
        async with fake.hub.use(name, ReadyModel) as model:
            assert model.name == "org/a"
    with pytest.raises(NotFound, match="Served: org/a, gpt-4o, a, b"):
        await fake.ask("c")
    with pytest.raises(ModelError, match="two models have the name or alias 'gpt-4o'"):
        fake.add("c", aliases=("gpt-4o",))


@on_loop
async def test_a_failed_load_fails_all_waiting_requests_and_can_be_retried() -> None:
    fake = FakeHub()
    fake.add("a")
    broken = True

    async def refuse(name: str) -> None:
        if broken:
            raise ModelError("the weights are corrupt")

    fake.before_load = refuse
    ends = await asyncio.gather(*(fake.ask("a") for _ in range(10)), return_exceptions=True)
    assert all(isinstance(end, EngineGone) and "corrupt" in end.message for end in ends)
    assert fake.loads == ["a"], "all waiting requests share the load"
    card = fake.hub.card("a")
    assert (card.state, card.error) == ("failed", "the weights are corrupt")
    with pytest.raises(EngineGone, match="POST /v1/models/a/load tries again"):
        await fake.ask("a")
    assert fake.loads == ["a"], "a request does not retry a failed model"
    broken = False
    assert (await fake.hub.load("a")).state == "ready"
    assert isinstance(await fake.ask("a"), Finished)


@on_loop
async def test_the_least_recently_used_model_is_evicted() -> None:
    fake = FakeHub(memory=20)
    for name in "abc":
        fake.add(name, 10)
    for name in "aba":
        await fake.ask(name)
    await fake.ask("c")
    assert [fake.state(name) for name in "abc"] == ["ready", "unloaded", "ready"]
    assert fake.hub.memory.reserved == 20


@on_loop
async def test_a_load_waits_for_memory_of_a_model_in_use() -> None:
    fake = FakeHub(memory=10)
    gate = Gate()
    fake.backends["a"] = lambda: FakeBackend(gate=gate)
    fake.add("a", 10)
    fake.add("b", 10)
    inbox = await fake.begin("a")
    other = asyncio.ensure_future(fake.ask("b"))
    await fake.until(lambda: fake.loads == ["a", "b"])
    await asyncio.sleep(0.02)
    assert (fake.state("a"), other.done()) == ("ready", False)
    gate.open()
    assert isinstance(await last_of(inbox), Finished)
    assert isinstance(await other, Finished)
    assert (fake.state("a"), fake.state("b")) == ("unloaded", "ready")


@on_loop
async def test_a_model_that_cannot_fit_evicts_nothing_and_has_not_failed() -> None:
    fake = FakeHub(memory=20)
    fake.add("a", 10)
    fake.add("big", 30)
    await fake.ask("a")
    with pytest.raises(InsufficientMemory):
        await fake.ask("big")
    assert (fake.state("a"), fake.state("big")) == ("ready", "unloaded")


@on_loop
async def test_idle_models_are_unloaded_but_pinned_ones_stay() -> None:
    fake = FakeHub(idle_unload=0.05, every=0.02)
    fake.add("a")
    fake.add("never", idle_unload=0.0)
    fake.add("pinned", pin=True)
    for name in ("a", "never", "pinned"):
        await fake.ask(name)
    await fake.until(lambda: fake.state("a") == "unloaded")
    assert (fake.state("never"), fake.state("pinned")) == ("ready", "ready")
    assert isinstance(await fake.ask("a"), Finished), "the next request loads it again"
    assert fake.loads.count("a") == 2


@on_loop
async def test_an_unload_lets_running_requests_finish_and_new_ones_load_again() -> None:
    fake = FakeHub()
    gate = Gate()
    fake.backends["a"] = lambda: FakeBackend(gate=gate)
    fake.add("a")
    inbox = await fake.begin("a")
    unloading = asyncio.ensure_future(fake.hub.unload("a"))
    await fake.until(lambda: fake.state("a") == "unloading")
    later = asyncio.ensure_future(fake.ask("a"))
    gate.open()
    assert isinstance(await last_of(inbox), Finished)
    await unloading
    assert isinstance(await later, Finished)
    assert fake.loads == ["a", "a"]


@on_loop
async def test_an_unload_cancels_a_load() -> None:
    fake = FakeHub()
    managed = fake.add("a")
    forever = asyncio.Event()

    async def wait(name: str) -> None:
        await forever.wait()

    fake.before_load = wait
    asking = asyncio.ensure_future(fake.ask("a"))
    await fake.until(lambda: managed.state == "loading")
    card = fake.hub.card("a")
    assert (card.progress, card.phase) == (0.0, "starting")
    managed.report_progress(LoadProgress("reading weights", 0.25))
    card = fake.hub.card("a")
    assert (card.progress, card.phase) == (0.25, "reading weights")
    assert (await fake.hub.unload("a")).state == "unloaded"
    with pytest.raises(LoadCancelled, match="'a' was unloaded by request while it was loading; send the request again"):
        await asking


@on_loop
async def test_a_load_that_is_cancelled_before_it_starts() -> None:
    fake = FakeHub()
    managed = fake.add("a", load_now=True)
    assert (await fake.hub.unload("a")).state == "unloaded"
    assert (fake.loads, managed.in_use) == ([], False)
    assert isinstance(await fake.ask("a"), Finished)


@on_loop
async def test_a_crashed_engine_is_restarted_until_it_crashed_too_often() -> None:
    fake = FakeHub()
    managed = fake.add("a")
    crashing = True
    fake.backends["a"] = lambda: Crashing() if crashing else FakeBackend()
    end = await fake.ask("a")
    assert isinstance(end, Failed)
    crashing = False
    assert isinstance(await fake.ask("a"), Finished)
    assert (managed.restarts, fake.hub.card("a").restarts) == (1, 1)
    crashing = True
    managed.load_soon()
    await fake.hub.unload("a")
    for _ in range(managed_model.MAX_CRASHES):
        assert isinstance(await fake.ask("a"), Failed)
    await fake.until(lambda: fake.state("a") == "failed")
    assert "crashed 5 times" in (fake.hub.card("a").error or "")
    with pytest.raises(EngineGone, match="crashed 5 times"):
        await fake.ask("a")
    crashing = False
    await fake.hub.load("a")
    assert isinstance(await fake.ask("a"), Finished)


@on_loop
async def test_an_engine_that_dies_while_it_loads_is_loaded_again_until_it_died_too_often() -> None:
    """At the first load and in the restart after a crash: what killed it may be over."""
    fake = FakeHub()
    managed = fake.add("a")
    deaths = 1

    async def die(name: str) -> None:
        nonlocal deaths
        deaths -= 1
        if deaths >= 0:
            raise EngineDied("the engine's process was killed by signal 9")

    fake.before_load = die
    ends = await asyncio.gather(*(fake.ask("a") for _ in range(3)), return_exceptions=True)
    for end in ends:
        assert isinstance(end, EngineGone)
        assert "signal 9. It is being loaded again" in end.message
        assert end.retry_after == 1
    assert isinstance(await fake.ask("a"), Finished), "nobody had to load it"
    deaths = 2
    fake.backends["a"] = Crashing
    await fake.hub.unload("a")
    with pytest.raises(EngineGone):
        await fake.ask("a")
    await fake.until(lambda: managed.loads == 5)
    deaths = 2
    assert isinstance(await fake.ask("a"), Failed), "this crash is the third in a row"
    fake.backends["a"] = FakeBackend
    await fake.until(lambda: fake.state("a") == "failed")
    await managed.settled()
    card = fake.hub.card("a")
    assert "crashed 5 times" in (card.error or "") and "signal 9" in (card.error or "")
    assert (card.reserved_bytes, managed.loads) == (None, 7)
    with pytest.raises(EngineGone, match="POST /v1/models/a/load tries again"):
        await fake.ask("a")
    assert (await fake.hub.load("a")).state == "ready"


@on_loop
async def test_an_unload_or_a_stop_ends_the_restart_of_an_engine_that_died_while_it_loaded() -> None:
    fake = FakeHub()
    managed = fake.add("a")

    async def die(name: str) -> None:
        raise EngineDied("the engine's process was killed by signal 9")

    fake.before_load = die
    for loads in (1, 2):
        with pytest.raises(EngineGone):
            await fake.ask("a")
        assert managed.loads == loads and fake.state("a") == "loading"
        assert (await fake.hub.unload("a")).state == "unloaded"
    with pytest.raises(EngineGone):
        await fake.ask("a")
    assert await fake.hub.close("closing time", 0.0, 5.0)
    assert (managed.loads, fake.state("a")) == (3, "stopped")


def hanging(gates: list[Gate]) -> Callable[[], FakeBackend]:
    def make() -> FakeBackend:
        gate = gates.pop(0)
        return FakeBackend(gate=gate)

    return make


@on_loop
async def test_a_hung_step_fails_its_requests_and_the_thread_is_replaced() -> None:
    fake = FakeHub(step_timeout=2.0, every=0.1)
    stuck, free = Gate(), Gate()
    free.open()
    fake.backends["a"] = hanging([stuck, free])
    managed = fake.add("a")
    inbox = await fake.begin("a")
    async with fake.hub.use("a", ReadyModel) as model:
        pass
    end = await last_of(inbox)
    assert isinstance(end, Failed)
    assert end.gone
    assert "--step-timeout 2" in end.message
    assert isinstance(await fake.ask("a"), Finished)
    assert managed.restarts == 1
    stuck.open()
    assert await asyncio.to_thread(model.engine.link.join, 10), "the old thread ends when its step returns"


@on_loop
async def test_close_stops_models_in_any_state() -> None:
    fake = FakeHub()
    for name in ("ready", "unloaded", "loading"):
        fake.add(name)
    await fake.ask("ready")
    forever = asyncio.Event()

    async def wait(name: str) -> None:
        await forever.wait()

    fake.before_load = wait
    asking = asyncio.ensure_future(fake.ask("loading"))
    await fake.until(lambda: fake.state("loading") == "loading")
    assert await fake.hub.close("closing time", 1.0, 5.0)
    with pytest.raises(EngineGone):
        await asking
    with pytest.raises(EngineGone, match="closing time"):
        await fake.ask("ready")
