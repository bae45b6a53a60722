"""Queues grammar checks in child processes: small grammars first, each with a time limit, cancelled with its request.

Nearly all grammars compile in milliseconds. So each is first tried with a short limit. One that takes longer is checked
again in a second queue with its own child, so that it does not delay others.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import OrderedDict
from dataclasses import dataclass

from millstream.errors import BadRequest, EngineBusy
from millstream.service.generation.grammar_process import GrammarProcess, TooSlow
from millstream.types import Grammar

QUICK_SECONDS = 0.25
MAX_SECONDS = 1.0
"""Limits on CPU time. The engine takes about as long again, on its background thread."""

DELAY_PER_BYTE = 20e-6
"""Seconds by which each byte delays a grammar's turn: small grammars overtake large ones, but not forever."""

MAX_WAITING = 64
"""Grammars that may wait in each queue."""

MAX_RESULTS = 256
MAX_RESULT_BYTES = 4 << 20
"""Limits of the result cache, in grammars and in bytes of their sources. Agents send the same few grammars with every
request."""
REFUSAL_SECONDS = 60.0
"""How long a refusal is cached."""


class CheckQueue:
    """One child and the grammars that wait for it. For the event loop only."""

    def __init__(self, seconds: float, *, keep_child: bool = True) -> None:
        """`seconds`: CPU time per grammar. `keep_child`: keep the child running when the queue is empty."""
        self._seconds = seconds
        self._keep_child = keep_child
        self._process = GrammarProcess()
        self._busy = False
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    async def check(self, grammar: Grammar) -> Grammar:
        """Raises what `GrammarProcess.check` raises, and `EngineBusy` if too many grammars wait."""
        await self._wait_turn(len(grammar.source))
        try:
            return await self._process.check(grammar, self._seconds)
        finally:
            if not self._keep_child and not self._waiting:
                await self._process.close()
            self._start_next()

    async def close(self) -> None:
        await self._process.close()

    async def _wait_turn(self, size: int) -> None:
        if not self._busy:
            self._busy = True
            return
        waiting = sum(not turn.done() for _, _, turn in self._waiting)
        if waiting >= MAX_WAITING:
            text = f"{waiting} grammars are already waiting to be checked. Try again later."
            raise EngineBusy(text, active=1, waiting=waiting, retry_after=1)
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (time.monotonic() + size * DELAY_PER_BYTE, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came in the same moment as the cancellation
                self._start_next()
            raise

    def _start_next(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False


@dataclass(slots=True)
class _Check:
    """A running check, shared by all requests with the same grammar."""

    task: asyncio.Task[Grammar]
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class _Result:
    grammar: Grammar | None
    """In the form that engines accept; None if it was refused."""
    refusal: str = ""
    expires_at: float = 0.0
    """Refusals only."""


class GrammarChecks:
    """Checks grammars for all models: the result does not depend on the vocabulary. For the event loop only."""

    def __init__(self, quick: float = QUICK_SECONDS, slow: float = MAX_SECONDS) -> None:
        self._quick = CheckQueue(quick)
        self._slow = CheckQueue(slow, keep_child=False)
        self._checks: dict[Grammar, _Check] = {}
        self._results: OrderedDict[Grammar, _Result] = OrderedDict()

    async def check(self, grammar: Grammar) -> Grammar:
        """Returns the grammar in the form that engines accept. Raises `BadRequest` if it cannot be served. If this is
        cancelled and no other request waits for the same grammar, the check is stopped."""
        if (result := self._cached(grammar)) is not None:
            if result.grammar is None:
                raise BadRequest(result.refusal)
            return result.grammar
        check = self._checks.get(grammar)
        if check is None:
            check = self._checks[grammar] = _Check(asyncio.create_task(self._run(grammar)))
        check.waiting += 1
        try:
            return await asyncio.shield(check.task)
        finally:
            check.waiting -= 1
            if not check.waiting:
                check.task.cancel()
                if self._checks.get(grammar) is check:
                    del self._checks[grammar]

    async def close(self) -> None:
        tasks = [check.task for check in self._checks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._quick.close(), self._slow.close())  # first: a job that hangs would be waited for
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, grammar: Grammar) -> Grammar:
        try:
            try:
                accepted = await self._quick.check(grammar)
            except TooSlow:
                accepted = await self._slow.check(grammar)
        except BadRequest as error:
            self._cache(grammar, _Result(None, error.message, time.monotonic() + REFUSAL_SECONDS))
            raise
        self._cache(grammar, _Result(accepted))
        return accepted

    def _cached(self, grammar: Grammar) -> _Result | None:
        result = self._results.get(grammar)
        if result is None or (result.grammar is None and result.expires_at < time.monotonic()):
            return None
        self._results.move_to_end(grammar)
        return result

    def _cache(self, grammar: Grammar, result: _Result) -> None:
        self._results[grammar] = result
        self._results.move_to_end(grammar)
        size = sum(len(each.source) for each in self._results)
        while len(self._results) > MAX_RESULTS or size > MAX_RESULT_BYTES:
            size -= len(self._results.popitem(last=False)[0].source)
