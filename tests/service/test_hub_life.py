"""Models that are loaded when they are wanted, leave when they are in the way, and come back when they die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from millstream.engine.generation.plan import Plan, StepResult
from millstream.engine.messages import Failed, Finished
from millstream.errors import EngineGone, InsufficientMemory, LoadCancelled, ModelError, NotFound
from millstream.service import managed_model
from millstream.service.ready_model import ReadyModel
from support.fake import FakeBackend, Gate
from support.hubs import Yard, last_of, on_loop


class Dying(FakeBackend):
    """Its engine ends in the first step: not a failed step, a defect of the engine."""

    def step(self, plan: Plan) -> StepResult:
        raise SystemExit("the engine dies")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed_model, "FIRST_BACKOFF", 0.001)


@on_loop
async def test_a_hundred_first_requests_cause_one_load() -> None:
    yard = Yard()
    yard.add("a")
    assert yard.state("a") == "unloaded"
    ends = await asyncio.gather(*(yard.ask("a") for _ in range(100)))
    assert all(isinstance(end, Finished) for end in ends)
    assert yard.loads == ["a"]


@on_loop
async def test_names_and_aliases() -> None:
    yard = Yard()
    yard.add("org/a", aliases=("gpt-4o", "a"))
    yard.add("b")
    for name in ("org/a", "gpt-4o", "a", ""):
        async with yard.hub.use(name, ReadyModel) as model:
            assert model.name == "org/a"
    with pytest.raises(NotFound, match="Served: org/a, gpt-4o, a, b"):
        await yard.ask("c")
    with pytest.raises(ModelError, match="two models are called 'gpt-4o'"):
        yard.add("c", aliases=("gpt-4o",))


@on_loop
async def test_a_failed_load_tells_everyone_and_can_be_tried_again() -> None:
    yard = Yard()
    yard.add("a")
    broken = True

    async def refuse(name: str) -> None:
        if broken:
            raise ModelError("the weights are corrupt")

    yard.before_load = refuse
    ends = await asyncio.gather(*(yard.ask("a") for _ in range(10)), return_exceptions=True)
    assert all(isinstance(end, EngineGone) and "corrupt" in end.message for end in ends)
    assert yard.loads == ["a"], "everyone who waited got the same answer"
    card = yard.hub.card("a")
    assert (card.state, card.error) == ("failed", "the weights are corrupt")
    with pytest.raises(EngineGone, match="POST /v1/models/a/load tries again"):
        await yard.ask("a")
    assert yard.loads == ["a"], "a failed model is not tried at every request"
    broken = False
    assert (await yard.hub.load("a")).state == "ready"
    assert isinstance(await yard.ask("a"), Finished)


@on_loop
async def test_the_least_recently_used_leaves_for_another() -> None:
    yard = Yard(memory=20)
    for name in "abc":
        yard.add(name, 10)
    for name in "aba":
        await yard.ask(name)
    await yard.ask("c")
    assert [yard.state(name) for name in "abc"] == ["ready", "unloaded", "ready"]
    assert yard.hub.room.held == 20


@on_loop
async def test_a_model_in_use_stays_and_the_load_waits_for_it() -> None:
    yard = Yard(memory=10)
    gate = Gate()
    yard.backends["a"] = lambda: FakeBackend(gate=gate)
    yard.add("a", 10)
    yard.add("b", 10)
    inbox = await yard.begin("a")
    other = asyncio.ensure_future(yard.ask("b"))
    await yard.until(lambda: yard.loads == ["a", "b"])
    await asyncio.sleep(0.02)
    assert (yard.state("a"), other.done()) == ("ready", False)
    gate.open()
    assert isinstance(await last_of(inbox), Finished)
    assert isinstance(await other, Finished)
    assert (yard.state("a"), yard.state("b")) == ("unloaded", "ready")


@on_loop
async def test_what_cannot_fit_evicts_nobody_and_is_no_failure() -> None:
    yard = Yard(memory=20)
    yard.add("a", 10)
    yard.add("big", 30)
    await yard.ask("a")
    with pytest.raises(InsufficientMemory):
        await yard.ask("big")
    assert (yard.state("a"), yard.state("big")) == ("ready", "unloaded")


@on_loop
async def test_idle_models_leave_after_their_time_and_pinned_ones_stay() -> None:
    yard = Yard(idle_unload=0.05, step_timeout=1.0)
    yard.add("a")
    yard.add("kept", idle_unload=0.0)
    yard.add("pinned", pin=True)
    for name in ("a", "kept", "pinned"):
        await yard.ask(name)
    await yard.until(lambda: yard.state("a") == "unloaded")
    assert (yard.state("kept"), yard.state("pinned")) == ("ready", "ready")
    assert isinstance(await yard.ask("a"), Finished), "and it comes back when it is wanted"
    assert yard.loads.count("a") == 2


@on_loop
async def test_unloading_lets_requests_inside_finish_and_new_ones_load_again() -> None:
    yard = Yard()
    gate = Gate()
    yard.backends["a"] = lambda: FakeBackend(gate=gate)
    yard.add("a")
    inbox = await yard.begin("a")
    leaving = asyncio.ensure_future(yard.hub.unload("a"))
    await yard.until(lambda: yard.state("a") == "unloading")
    late = asyncio.ensure_future(yard.ask("a"))
    gate.open()
    assert isinstance(await last_of(inbox), Finished)
    await leaving
    assert isinstance(await late, Finished)
    assert yard.loads == ["a", "a"]


@on_loop
async def test_unloading_gives_up_a_load() -> None:
    yard = Yard()
    entry = yard.add("a")
    forever = asyncio.Event()

    async def wait(name: str) -> None:
        await forever.wait()

    yard.before_load = wait
    asking = asyncio.ensure_future(yard.ask("a"))
    await yard.until(lambda: entry.state == "loading")
    assert yard.hub.card("a").progress == 0.0
    entry.progress(0.25)
    assert yard.hub.card("a").progress == 0.25
    assert (await yard.hub.unload("a")).state == "unloaded"
    with pytest.raises(LoadCancelled, match="'a' was unloaded by request while it was loading; ask again"):
        await asking


@on_loop
async def test_a_load_that_is_given_up_before_it_began() -> None:
    yard = Yard()
    entry = yard.add("a", now=True)
    assert (await yard.hub.unload("a")).state == "unloaded"
    assert (yard.loads, entry.in_use) == ([], False)
    assert isinstance(await yard.ask("a"), Finished)


@on_loop
async def test_an_engine_that_dies_is_started_again_until_that_is_hopeless() -> None:
    yard = Yard()
    entry = yard.add("a")
    dying = True
    yard.backends["a"] = lambda: Dying() if dying else FakeBackend()
    end = await yard.ask("a")
    assert isinstance(end, Failed)
    dying = False
    assert isinstance(await yard.ask("a"), Finished)
    assert (entry.restarts, yard.hub.card("a").restarts) == (1, 1)
    dying = True
    entry.load_soon()
    await yard.hub.unload("a")
    for _ in range(managed_model.MOST_CRASHES):
        assert isinstance(await yard.ask("a"), Failed)
    await yard.until(lambda: yard.state("a") == "failed")
    assert "given up after 5 crashes" in (yard.hub.card("a").error or "")
    with pytest.raises(EngineGone, match="given up after 5 crashes"):
        await yard.ask("a")
    dying = False
    await yard.hub.load("a")
    assert isinstance(await yard.ask("a"), Finished)


def hanging(gates: list[Gate]) -> Callable[[], FakeBackend]:
    def make() -> FakeBackend:
        gate = gates.pop(0)
        return FakeBackend(gate=gate)

    return make


@on_loop
async def test_a_step_that_does_not_return_fails_its_requests_and_the_thread_is_replaced() -> None:
    yard = Yard(step_timeout=0.5)
    stuck, free = Gate(), Gate()
    free.open()
    yard.backends["a"] = hanging([stuck, free])
    entry = yard.add("a")
    inbox = await yard.begin("a")
    async with yard.hub.use("a", ReadyModel) as model:
        pass
    end = await last_of(inbox)
    assert isinstance(end, Failed)
    assert end.gone
    assert "--step-timeout 0.5" in end.message
    assert isinstance(await yard.ask("a"), Finished)
    assert entry.restarts == 1
    stuck.open()
    assert await asyncio.to_thread(model.engine.link.join, 10), "when its step returns, the old thread ends"


@on_loop
async def test_closing_ends_everything_in_any_state() -> None:
    yard = Yard()
    for name in ("ready", "unloaded", "loading"):
        yard.add(name)
    await yard.ask("ready")
    forever = asyncio.Event()

    async def wait(name: str) -> None:
        await forever.wait()

    yard.before_load = wait
    asking = asyncio.ensure_future(yard.ask("loading"))
    await yard.until(lambda: yard.state("loading") == "loading")
    assert await yard.hub.close("closing time", 1.0, 5.0)
    with pytest.raises(EngineGone):
        await asking
    with pytest.raises(EngineGone, match="closing time"):
        await yard.ask("ready")
