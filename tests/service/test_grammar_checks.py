"""Grammar checks in child processes: no grammar crashes or blocks the server, and small ones go first."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from millstream.errors import BadRequest, EngineBusy
from millstream.service.generation import grammar_checks
from millstream.service.generation.grammar_checks import CheckQueue, GrammarChecks
from millstream.service.generation.grammar_process import GrammarProcess, TooSlow
from millstream.types import Grammar
from support.nasty_grammars import NASTY, Nasty

SMALL = Grammar("regex", "[ab]{3}")
ENDLESS = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')
DEEP = next(nasty.grammar for nasty in NASTY if nasty.name == "a chain of 3000")
PATIENCE = 60


@asynccontextmanager
async def checking(**limits: float) -> AsyncIterator[GrammarChecks]:
    checks = GrammarChecks(**limits)
    try:
        async with asyncio.timeout(PATIENCE):
            yield checks
    finally:
        await checks.close()


def run(work: Callable[[GrammarChecks], Awaitable[None]], **limits: float) -> None:
    async def main() -> None:
        async with checking(**limits) as checks:
            await work(checks)

    asyncio.run(main())


def child_of(queue: CheckQueue) -> asyncio.subprocess.Process | None:
    return queue._process._child


async def working_child(queue: CheckQueue) -> asyncio.subprocess.Process:
    """Waits until the queue's child runs a job, and returns the child."""
    while (child := child_of(queue)) is None or not forks(child.pid):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return child


def forks(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children()


def test_nasty_grammars_are_served_or_refused() -> None:
    """All at once in the same children: none affects the ones after it."""

    async def outcome(checks: GrammarChecks, nasty: Nasty) -> str | None:
        try:
            await checks.check(nasty.grammar)
        except BadRequest as error:
            assert len(error.message) < 1_000
            return error.message
        return None

    async def work(checks: GrammarChecks) -> None:
        outcomes = await asyncio.gather(*(outcome(checks, nasty) for nasty in NASTY))
        wrong = {}
        for nasty, refusal in zip(NASTY, outcomes, strict=True):
            if (refusal is None) != (nasty.refused is None) or (nasty.refused or "") not in (refusal or ""):
                wrong[nasty.name] = refusal
        assert wrong == {}
        assert await checks.check(SMALL) == SMALL

    run(work, quick=0.15, slow=0.8)


def test_a_small_grammar_does_not_wait_for_large_ones() -> None:
    async def work(checks: GrammarChecks) -> None:
        slow = [
            asyncio.create_task(checks.check(Grammar("json_schema", f'{{"multipleOf": {999_983 + n}}}')))
            for n in range(3)
        ]
        slow += [asyncio.create_task(checks.check(ENDLESS))]
        await working_child(checks._slow)
        assert await checks.check(SMALL) == SMALL
        assert not all(task.done() for task in slow), "the slow queue has finished too early for this test"
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    run(work, quick=0.1, slow=20)


def test_small_grammars_overtake_large_ones_but_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(grammar_checks.time, "monotonic", lambda: now)
    order: list[str] = []

    async def main() -> None:
        nonlocal now
        queue = CheckQueue(1.0)
        gate = asyncio.Event()

        async def check(grammar: Grammar, seconds: float) -> Grammar:
            await gate.wait()
            order.append(grammar.source[:5])
            return grammar

        monkeypatch.setattr(queue._process, "check", check)
        tasks = []
        for at, source in [(0, "first"), (0, "large" + "x" * 100_000), (0.1, "small"), (3, "later")]:
            now = at
            tasks.append(asyncio.create_task(queue.check(Grammar("regex", source))))
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert order == ["first", "small", "large", "later"]


def test_cancelling_the_request_stops_its_check() -> None:
    async def work(checks: GrammarChecks) -> None:
        task = asyncio.create_task(checks.check(ENDLESS))
        child = await working_child(checks._slow)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await child.wait()
        assert time.monotonic() - began < 40
        assert await checks.check(SMALL) == SMALL

    run(work, quick=0.05, slow=60)


def test_cancelling_stops_the_job_and_keeps_the_child() -> None:
    async def work(checks: GrammarChecks) -> None:
        task = asyncio.create_task(checks.check(ENDLESS))
        child = await working_child(checks._quick)
        task.cancel()
        assert await checks.check(SMALL) == SMALL
        assert child_of(checks._quick) is child
        assert forks(child.pid) == []

    run(work, quick=30)


def test_a_job_can_be_stopped_at_any_moment() -> None:
    """Also before the child has read it, and while it forks: else the next grammar would wait for the limit."""

    async def main() -> None:
        process = GrammarProcess()
        await process.check(SMALL, 30)
        child = process._child
        moments = random.Random(1)
        for _ in range(100):
            task = asyncio.create_task(process.check(ENDLESS, 300))
            await asyncio.sleep(moments.random() * 0.006)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert process._child is child
        assert await process.check(SMALL, 30) == SMALL
        await process.close()

    asyncio.run(main())


def test_a_cancelled_waiter_is_skipped() -> None:
    async def work(checks: GrammarChecks) -> None:
        first = asyncio.create_task(checks.check(ENDLESS))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(checks.check(Grammar("regex", f"a{{{n}}}"))) for n in range(1, 4)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        assert [await waiting[0], await waiting[2]] == [Grammar("regex", "a{1}"), Grammar("regex", "a{3}")]
        with pytest.raises(BadRequest, match="too long"):
            await first

    run(work, quick=0.1, slow=0.2)


def test_the_same_grammar_is_checked_once_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Grammar] = []
    original = GrammarProcess.check

    async def check(self: GrammarProcess, grammar: Grammar, seconds: float) -> Grammar:
        checked.append(grammar)
        return await original(self, grammar, seconds)

    monkeypatch.setattr(GrammarProcess, "check", check)

    async def work(checks: GrammarChecks) -> None:
        cancelled, *others = [asyncio.create_task(checks.check(SMALL)) for _ in range(5)]
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await asyncio.gather(*others) == [SMALL] * 4
        assert await checks.check(SMALL) == SMALL
        for _ in range(3):
            with pytest.raises(BadRequest, match="nested too deeply"):
                await checks.check(DEEP)
        assert checked == [SMALL, DEEP]

    run(work)


def test_too_many_waiting_grammars_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 2)

    async def work(checks: GrammarChecks) -> None:
        tasks = [asyncio.create_task(checks.check(Grammar("regex", f"a{{{n}}}"))) for n in range(1, 5)]
        results: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [Grammar, Grammar, Grammar, EngineBusy]

    run(work)


def test_a_child_that_was_killed_is_replaced() -> None:
    async def work(checks: GrammarChecks) -> None:
        await checks.check(SMALL)
        child = child_of(checks._quick)
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
        assert await checks.check(Grammar("regex", "b")) == Grammar("regex", "b")

    run(work)


def test_a_child_enforces_its_cpu_limit() -> None:
    async def main() -> None:
        process = GrammarProcess()
        with pytest.raises(TooSlow, match=r"more than 0\.2 s"):
            await process.check(ENDLESS, 0.2)
        assert await process.check(SMALL, 1.0) == SMALL
        await process.close()

    asyncio.run(main())


def test_a_stopped_child_and_the_fork_of_its_job_end_at_once() -> None:
    """The fork holds the child's pipes, and Python waits for their end."""

    async def work(checks: GrammarChecks) -> None:
        task = asyncio.create_task(checks.check(ENDLESS))
        child = await working_child(checks._quick)
        [fork] = forks(child.pid)
        fork.suspend()
        psutil.Process(child.pid).suspend()
        await checks.close()
        assert task.cancelled()
        assert not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE
        assert child.returncode == -signal.SIGKILL

    run(work, quick=60)


def test_gbnf_is_converted_for_the_engine() -> None:
    async def work(checks: GrammarChecks) -> None:
        accepted = await checks.check(Grammar("gbnf", 'root ::= "a" | "b"'))
        assert accepted.kind == "lark"
        assert "start" in accepted.source

    run(work)
