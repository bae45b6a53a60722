"""Requests that start or end together go on one per turn of the event loop, and tokens of others pass by them."""

from __future__ import annotations

import asyncio
import gc
from contextvars import ContextVar

import pytest

from millstream.service import turnstile as module
from millstream.service.turnstile import Turnstile, turnstile


def play(scene) -> None:
    asyncio.run(asyncio.wait_for(scene, 30))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_who_is_alone_passes_at_once() -> None:
    async def scene() -> None:
        passed: list[int] = []
        subject = Turnstile()
        for number in range(3):
            subject.enter(lambda number=number: passed.append(number), begun=False)
            assert passed == list(range(number + 1))
            await asyncio.sleep(0)  # the next one comes in the next turn

    play(scene())


def test_one_passes_per_turn_and_what_is_ready_comes_between() -> None:
    async def scene() -> None:
        order: list[str] = []
        subject = Turnstile()
        loop = asyncio.get_running_loop()

        def request(number: int) -> None:
            order.append(f"request {number}")
            if number == 1:
                loop.call_soon(order.append, "token")  # comes while others wait

        for number in range(4):
            subject.enter(lambda number=number: request(number), begun=False)
        assert order == ["request 0"]
        seen = []
        while len(order) < 5:
            before = sum(each.startswith("request") for each in order)
            await asyncio.sleep(0)
            seen.append(sum(each.startswith("request") for each in order) - before)
        assert max(seen) == 1
        assert order == ["request 0", "request 1", "token", "request 2", "request 3"]

    play(scene())


def test_a_task_that_was_woken_runs_before_the_next_passes() -> None:
    """So a turn has the work of one request, not of all that were woken."""

    async def scene() -> None:
        subject = Turnstile()
        order: list[str] = []

        async def task(number: int, go: asyncio.Future[None]) -> None:
            await go
            order.append(f"task {number}")

        futures = [asyncio.get_running_loop().create_future() for _ in range(3)]
        tasks = [asyncio.create_task(task(number, each)) for number, each in enumerate(futures)]
        await asyncio.sleep(0)
        for number, each in enumerate(futures):

            def wake(number: int = number, each: asyncio.Future[None] = each) -> None:
                order.append(f"wake {number}")
                each.set_result(None)

            subject.enter(wake, begun=True)
        await asyncio.gather(*tasks)
        assert order == ["wake 0", "task 0", "wake 1", "task 1", "wake 2", "task 2"]

    play(scene())


def test_requests_that_have_begun_come_first_each_kind_in_order() -> None:
    async def scene() -> None:
        passed: list[str] = []
        subject = Turnstile()
        for name, begun in (("a", False), ("b", False), ("C", True), ("d", False), ("E", True)):
            subject.enter(lambda name=name: passed.append(name), begun=begun)
        await turns(10)
        assert "".join(passed) == "aCEbd"
        await asyncio.sleep(0)
        subject.enter(lambda: passed.append("f"), begun=False)
        assert passed[-1] == "f"

    play(scene())


def test_after_tokens_as_many_pass_as_take_as_long() -> None:
    """A request takes 2 s here, which pass when it is called."""

    async def scene() -> None:
        now = 0.0
        passed: list[int] = []
        subject = Turnstile(lambda: now)

        def request(number: int) -> None:
            nonlocal now
            now += 2.0
            passed.append(number)

        for number in range(20):
            subject.enter(lambda number=number: request(number), begun=False)
        counts = []
        for tokens in (0.0, 0.0, 6.0, 0.0, 1.0, 0.0):
            before = len(passed)
            now += tokens
            subject.delivered(tokens)
            await asyncio.sleep(0)
            counts.append(len(passed) - before)
        assert counts == [1, 1, 4, 1, 1, 1]
        assert passed == list(range(10))

    play(scene())


def test_a_call_that_raises_stops_nobody() -> None:
    async def scene() -> None:
        passed: list[str] = []
        reported: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, found: reported.append(found["exception"]))
        subject = Turnstile()

        def fail() -> None:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            subject.enter(fail, begun=False)
        subject.enter(fail, begun=False)
        subject.enter(lambda: passed.append("after"), begun=False)
        await turns(10)
        assert [str(error) for error in reported] == ["broken"]

    play(scene())


def test_who_has_waited_does_not_run_in_the_context_of_another() -> None:
    name: ContextVar[str] = ContextVar("name", default="nobody")

    async def scene() -> None:
        seen: list[str] = []
        subject = Turnstile()

        async def request(number: int) -> None:
            name.set(f"request {number}")
            subject.enter(lambda: seen.append(name.get()), begun=False)

        await asyncio.gather(*(request(number) for number in range(3)))
        await turns(10)
        assert seen == ["request 0", "nobody", "nobody"]

    play(scene())


def test_each_loop_has_one_and_it_is_forgotten_with_its_loop() -> None:
    gc.collect()
    before = len(module._TURNSTILES)

    async def scene() -> None:
        assert turnstile() is turnstile()
        assert len(module._TURNSTILES) == before + 1
        for _ in range(3):
            turnstile().enter(lambda: None, begun=False)

    play(scene())
    gc.collect()
    assert len(module._TURNSTILES) == before
