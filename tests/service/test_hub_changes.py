"""Models that are added, removed and changed while requests run."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from millstream.config import ModelSpec
from millstream.engine.messages import Failed, Finished
from millstream.errors import NotFound
from millstream.service.managed_model import ManagedModel
from millstream.service.ready_model import ReadyModel
from support.fake import FakeBackend, Gate
from support.hubs import FakeHub, last_of, on_loop


def held(fake: FakeHub, name: str) -> Gate:
    """The next engine of this model waits in each step until the gate is opened."""
    gate = Gate()
    fake.backends[name] = lambda *_: FakeBackend(gate=gate)
    return gate


def update(fake: FakeHub, name: str, *, reload: bool, load_now: bool = False, **spec: Any) -> ManagedModel:
    loader = functools.partial(fake._load, name, 10)
    spec = ModelSpec(name, **spec)  # type: ignore[assignment]
    return fake.hub.update(name, spec, loader, isolation="thread", reload=reload, load_now=load_now)  # type: ignore[arg-type]


@on_loop
async def test_a_removed_model_finishes_its_requests_and_is_freed() -> None:
    fake = FakeHub(memory=25)
    gate = held(fake, "a")
    model = fake.add("a", aliases=("x",))
    fake.add("b")
    running = await fake.begin("a", tokens=5)
    await asyncio.to_thread(gate.wait_entered)
    ended = asyncio.Event()
    fake.hub.remove("a", ended.set)
    assert [card.name for card in fake.hub.cards()] == ["b"]
    for name in ("a", "x"):
        with pytest.raises(NotFound, match="Served: b"):
            fake.hub.card(name)
    assert isinstance(await fake.ask("b"), Finished), "other models notice nothing"
    assert isinstance(await fake.ask(""), Finished), "the default is a model that is served"
    assert model.state == "ready" and not ended.is_set() and fake.hub.memory.reserved == 20
    gate.open()
    assert isinstance(await last_of(running), Finished)
    await ended.wait()
    assert model.state == "unloaded" and fake.hub.memory.reserved == 10
    assert await fake.hub.close("stop", 1.0, 5.0)


@on_loop
async def test_a_model_that_is_removed_while_it_loads_answers_those_who_wait() -> None:
    fake = FakeHub()
    go, loading = asyncio.Event(), asyncio.Event()

    async def wait(_: str) -> None:
        loading.set()
        await go.wait()

    fake.before_load = wait
    fake.add("a")
    fake.add("b", load_now=True)
    asking = asyncio.ensure_future(fake.ask("a"))
    await loading.wait()
    ended = [asyncio.Event(), asyncio.Event()]
    fake.hub.remove("b", ended[1].set)
    await ended[1].wait()  # nobody waits for it: its load is cancelled
    fake.hub.remove("a", ended[0].set)
    await asyncio.sleep(0)
    assert not ended[0].is_set()
    go.set()
    assert isinstance(await asking, Finished)
    await ended[0].wait()
    assert fake.hub.cards() == []
    assert await fake.hub.close("stop", 1.0, 5.0)


@on_loop
async def test_options_change_without_a_reload() -> None:
    fake = FakeHub(idle_unload=50.0)
    model = fake.add("a", aliases=("x",), load_now=True)
    await fake.hub.settled()
    engine = model.model.engine if model.model else None
    assert model.idle_limit == 50.0
    update(fake, "a", reload=False, aliases=("y",), pin=True, max_tokens=3)
    assert fake.hub.card("y").aliases == ("y",) and fake.hub.card("a").pinned and model.idle_limit is None
    with pytest.raises(NotFound):
        fake.hub.card("x")
    async with fake.hub.use("y", ReadyModel) as ready:
        assert ready.engine is engine and ready.spec.max_tokens == 3
    update(fake, "a", reload=False, idle_unload=7.0)
    assert model.idle_limit == 7.0 and fake.loads == ["a"]
    assert isinstance(await fake.ask("a"), Finished)
    assert await fake.hub.close("stop", 1.0, 5.0)


@on_loop
async def test_a_crash_after_a_change_of_options_still_restarts_the_engine() -> None:
    fake = FakeHub()
    model = fake.add("a", load_now=True)
    await fake.hub.settled()
    update(fake, "a", reload=False, pin=True)
    assert model.model is not None
    model.model.engine.disown("it hangs")
    await fake.until(lambda: model.restarts == 1 and model.state == "ready")
    async with fake.hub.use("a", ReadyModel) as ready:
        assert ready.spec.pin, "the loader of the test knows the old options: the model has the new ones"
    assert await fake.hub.close("stop", 1.0, 5.0)


@on_loop
async def test_a_reload_lets_requests_finish_and_new_ones_wait_for_the_new_engine() -> None:
    fake = FakeHub()
    gate = held(fake, "a")
    model = fake.add("a")
    running = await fake.begin("a", tokens=5)
    await asyncio.to_thread(gate.wait_entered)
    del fake.backends["a"]
    update(fake, "a", reload=True, max_batch=3)
    await fake.until(lambda: model.state == "unloading")
    asking = asyncio.ensure_future(fake.ask("a"))
    update(fake, "a", reload=True, max_batch=2)  # once more, before the first reload has ended
    await asyncio.sleep(0.05)
    assert fake.loads == ["a"] and not asking.done()
    gate.open()
    assert isinstance(await last_of(running), Finished)
    assert isinstance(await asking, Finished)
    assert fake.loads == ["a", "a"] and model.state == "ready"
    assert model.model is not None and model.model.spec.max_batch == 2
    assert await fake.hub.close("stop", 1.0, 5.0)


@on_loop
async def test_a_reload_during_a_load_starts_it_again_and_its_waiters_wait_on() -> None:
    fake = FakeHub()
    loading = asyncio.Event()

    async def wait(_: str) -> None:
        if not loading.is_set():
            loading.set()
            await asyncio.Event().wait()  # until it is cancelled

    fake.before_load = wait
    model = fake.add("a")
    asking = [asyncio.ensure_future(fake.ask("a")) for _ in range(3)]
    await loading.wait()
    update(fake, "a", reload=True, max_batch=3)
    assert all(isinstance(event, Finished) for event in await asyncio.gather(*asking))
    assert fake.loads == ["a", "a"] and model.model is not None and model.model.spec.max_batch == 3
    assert await fake.hub.close("stop", 1.0, 5.0)


@on_loop
async def test_a_reload_loads_what_failed_but_not_what_is_unloaded() -> None:
    fake = FakeHub()

    def broken(*_: object) -> FakeBackend:
        raise RuntimeError("broken files")

    fake.backends["a"] = broken
    model = fake.add("a", load_now=True)
    idle = fake.add("b")
    await fake.hub.settled()
    assert model.state == "failed"
    del fake.backends["a"]
    for name in "ab":
        update(fake, name, reload=True, max_batch=3)
    await fake.until(lambda: model.state == "ready")
    assert idle.state == "unloaded" and fake.loads == ["a", "a"]
    update(fake, "b", reload=False, load="start", load_now=True)
    await fake.until(lambda: idle.state == "ready")
    await fake.hub.unload("b")
    update(fake, "b", reload=True, max_batch=2, load_now=True)
    await fake.until(lambda: idle.state == "ready")
    assert fake.loads == ["a", "a", "b", "b"], "it is loaded once, not again for the reload"
    assert await fake.hub.close("stop", 1.0, 5.0)


@on_loop
async def test_a_model_that_is_added_again_before_it_has_ended() -> None:
    fake = FakeHub(memory=10)
    gate = held(fake, "a")
    model = fake.add("a")
    running = await fake.begin("a", tokens=5)
    await asyncio.to_thread(gate.wait_entered)
    fake.hub.remove("a", lambda: pytest.fail("it is served again"))
    await asyncio.sleep(0)
    del fake.backends["a"]
    assert fake.add("a", max_batch=3) is model
    asking = asyncio.ensure_future(fake.ask("a"))
    await fake.until(lambda: model.state == "unloading")
    gate.open()
    assert isinstance(await last_of(running), Finished)
    assert isinstance(await asking, Finished)
    assert fake.loads == ["a", "a"] and fake.hub.memory.reserved == 10
    fake.hub.remove("a", lambda: pytest.fail("it is served again"))
    while model.state != "unloading":  # noqa: ASYNC110 - it lasts for moments
        await asyncio.sleep(0)
    fake.add("a", load_now=True)
    await fake.until(lambda: model.state == "ready")
    assert fake.loads == ["a", "a", "a"]
    assert await fake.hub.close("stop", 1.0, 5.0)


@pytest.mark.parametrize("removed", [True, False])
@on_loop
async def test_the_server_stops_while_a_model_waits_for_its_requests(removed: bool) -> None:
    fake = FakeHub()
    gate = held(fake, "a")
    model = fake.add("a")
    running = await fake.begin("a", tokens=5000)
    await asyncio.to_thread(gate.wait_entered)
    if removed:
        fake.hub.remove("a")
    else:
        update(fake, "a", reload=True, max_batch=3)
        await fake.until(lambda: model.state == "unloading")
    closing = asyncio.ensure_future(fake.hub.close("stop", 0.05, 30.0))
    await asyncio.sleep(0.1)
    gate.open()
    assert await closing, "the engine is stopped after the grace period, not abandoned"
    last = await last_of(running)
    assert isinstance(last, Failed) and last.message == "stop", "the true reason, not the one of the unload"
    assert model.state == "stopped"


@on_loop
async def test_the_first_model_of_the_file_is_the_default() -> None:
    fake = FakeHub()
    for name in "abc":
        fake.add(name)
    fake.hub.reorder(["c", "a", "b"])
    assert [card.name for card in fake.hub.cards()] == ["c", "a", "b"]
    assert fake.hub.card("").name == "c"
    assert await fake.hub.close("stop", 1.0, 5.0)
