"""How long a model stays loaded when a client says so: `keep_loaded`, and what its card says about it."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from millstream.engine.generation.plan import Plan, StepResult
from millstream.engine.messages import Failed, Finished
from millstream.errors import NotFound
from support.fake import FakeBackend, Gate
from support.hubs import FakeHub, last_of, on_loop

TICK = 0.02
"""The hub looks for idle models this often."""


@on_loop
async def test_zero_unloads_an_idle_model_at_once() -> None:
    fake = FakeHub()
    fake.add("a")
    await fake.ask("a")
    card = fake.hub.keep_loaded("a", 0)
    assert card.expires == pytest.approx(time.time(), abs=1)
    await fake.until(lambda: fake.state("a") == "unloaded")


@on_loop
async def test_zero_lets_a_running_request_end() -> None:
    fake = FakeHub(every=TICK)
    gate = Gate()
    fake.backends["a"] = lambda: FakeBackend(gate=gate)
    fake.add("a")
    inbox = await fake.begin("a")
    fake.hub.keep_loaded("a", 0)
    await asyncio.sleep(0.05)
    assert fake.state("a") == "ready"
    gate.open()
    assert isinstance(await last_of(inbox), Finished)
    await fake.until(lambda: fake.state("a") == "unloaded")


@on_loop
async def test_the_setting_ends_with_the_unload() -> None:
    """Otherwise one client's 0 would unload the model after each request of all others."""
    fake = FakeHub(every=TICK)
    fake.add("a")
    await fake.ask("a")
    fake.hub.keep_loaded("a", 0)
    await fake.until(lambda: fake.state("a") == "unloaded")
    await fake.ask("a")
    await asyncio.sleep(8 * TICK)
    assert fake.state("a") == "ready" and fake.hub.card("a").expires is None


@on_loop
async def test_it_can_be_set_before_the_load() -> None:
    fake = FakeHub(every=TICK)
    fake.add("a")
    fake.hub.keep_loaded("a", 0)
    await fake.ask("a")
    await fake.until(lambda: fake.state("a") == "unloaded")


@on_loop
async def test_some_seconds_count_from_the_last_request() -> None:
    fake = FakeHub(every=TICK)
    fake.add("a")
    await fake.ask("a")
    card = fake.hub.keep_loaded("a", 0.3)
    assert card.last_used is not None and card.expires == pytest.approx(card.last_used + 0.3, abs=0.001)
    begun = time.monotonic()
    await fake.until(lambda: fake.state("a") == "unloaded")
    assert time.monotonic() - begun > 0.25
    assert (fake.hub.card("a").last_used, fake.hub.card("a").expires) == (None, None)


@pytest.mark.parametrize("seconds, stays", [(math.inf, True), (None, False)])
def test_infinity_and_none_against_the_server_s_setting(seconds: float | None, stays: bool) -> None:
    @on_loop
    async def test() -> None:
        fake = FakeHub(every=TICK, idle_unload=0.05)
        fake.add("a")
        await fake.ask("a")
        assert (fake.hub.keep_loaded("a", seconds).expires is None) == stays
        if stays:
            await asyncio.sleep(16 * TICK)
            assert fake.state("a") == "ready"
        else:
            await fake.until(lambda: fake.state("a") == "unloaded")

    test()


@on_loop
async def test_a_pinned_model_stays() -> None:
    fake = FakeHub(every=TICK)
    fake.add("a", pin=True)
    await fake.ask("a")
    assert fake.hub.keep_loaded("a", 0).expires is None
    await asyncio.sleep(8 * TICK)
    assert fake.state("a") == "ready"


@on_loop
async def test_the_model_s_own_setting_counts_before_the_server_s() -> None:
    fake = FakeHub(idle_unload=5.0)
    fake.add("a", idle_unload=60.0)
    fake.add("b")
    fake.add("c", idle_unload=0.0)
    for name in "abc":
        await fake.ask(name)
    expires = [fake.hub.card(name).expires for name in "abc"]
    assert expires == [pytest.approx(time.time() + 60, abs=2), pytest.approx(time.time() + 5, abs=2), None]


class CrashesOnce(FakeBackend):
    crashed = False

    def step(self, plan: Plan) -> StepResult:
        if not CrashesOnce.crashed:
            CrashesOnce.crashed = True
            raise SystemExit("the engine crashes")
        return super().step(plan)


@on_loop
async def test_it_survives_a_crash() -> None:
    fake = FakeHub(idle_unload=60.0)
    fake.backends["a"] = CrashesOnce
    fake.add("a")
    inbox = await fake.begin("a")
    fake.hub.keep_loaded("a", math.inf)
    assert isinstance(await last_of(inbox), Failed)
    assert isinstance(await fake.ask("a"), Finished)
    assert fake.hub.card("a").restarts == 1 and fake.hub.card("a").expires is None


@on_loop
async def test_an_unknown_model() -> None:
    fake = FakeHub()
    fake.add("a")
    with pytest.raises(NotFound, match="Served: a"):
        fake.hub.keep_loaded("b", 0)
