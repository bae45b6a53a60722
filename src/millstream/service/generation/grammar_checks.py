"""Checks of grammars in child processes: in fair order, each for a limited time, and none for a client who has left.

Nearly all grammars take milliseconds. So each is tried for a short time first, and one that takes longer goes on in a
second lane, with a child of its own: those behind it do not wait for it.
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
MOST_SECONDS = 1.0
"""Of CPU time. An engine needs about as long once more, on a thread beside its owner."""

SECONDS_A_BYTE = 20e-6
"""How much later than it came a grammar is due, for each byte: small ones overtake large ones, but not for ever."""

MOST_WAITING = 64
"""In a lane."""

MOST_VERDICTS = 256
MOST_VERDICT_BYTES = 4 << 20
"""Of the sources of grammars whose verdict is remembered: agents send the same few with every request."""
REFUSED_SECONDS = 60.0
"""How long a refusal is remembered."""


class Lane:
    """One child, and those who wait for it. Loop only."""

    def __init__(self, seconds: float, *, keep: bool = True) -> None:
        """`keep`: have the child wait for more work."""
        self._seconds = seconds
        self._keep = keep
        self._process = GrammarProcess()
        self._busy = False
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    async def check(self, grammar: Grammar) -> Grammar:
        """Raises as `GrammarProcess.check` does, and `EngineBusy` if too many wait."""
        await self._turn(len(grammar.source))
        try:
            return await self._process.check(grammar, self._seconds)
        finally:
            if not self._keep and not self._waiting:
                await self._process.close()
            self._next()

    async def close(self) -> None:
        await self._process.close()

    async def _turn(self, size: int) -> None:
        if not self._busy:
            self._busy = True
            return
        waiting = sum(not turn.done() for _, _, turn in self._waiting)
        if waiting >= MOST_WAITING:
            text = f"{waiting} grammars wait to be checked already. Try again later."
            raise EngineBusy(text, active=1, waiting=waiting, retry_after=1)
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (time.monotonic() + size * SECONDS_A_BYTE, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came, and at the same moment its client left
                self._next()
            raise

    def _next(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False


@dataclass(slots=True)
class _Check:
    """One for all who wait for the same grammar."""

    task: asyncio.Task[Grammar]
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class _Verdict:
    fit: Grammar | None
    refusal: str = ""
    until: float = 0.0


class GrammarChecks:
    """For all models of a server: what is checked does not depend on a vocabulary. Loop only."""

    def __init__(self, quick: float = QUICK_SECONDS, most: float = MOST_SECONDS) -> None:
        self._quick = Lane(quick)
        self._slow = Lane(most, keep=False)
        self._checks: dict[Grammar, _Check] = {}
        self._verdicts: OrderedDict[Grammar, _Verdict] = OrderedDict()

    async def check(self, grammar: Grammar) -> Grammar:
        """The grammar as an engine takes it. Raises `BadRequest` for what cannot be served. If it is cancelled and
        nobody else waits for the same grammar, its check ends."""
        if (verdict := self._remembered(grammar)) is not None:
            if verdict.fit is None:
                raise BadRequest(verdict.refusal)
            return verdict.fit
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
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._quick.close()
        await self._slow.close()

    async def _run(self, grammar: Grammar) -> Grammar:
        try:
            try:
                fit = await self._quick.check(grammar)
            except TooSlow:
                fit = await self._slow.check(grammar)
        except BadRequest as error:
            self._remember(grammar, _Verdict(None, error.message, time.monotonic() + REFUSED_SECONDS))
            raise
        self._remember(grammar, _Verdict(fit))
        return fit

    def _remembered(self, grammar: Grammar) -> _Verdict | None:
        verdict = self._verdicts.get(grammar)
        if verdict is None or (verdict.fit is None and verdict.until < time.monotonic()):
            return None
        self._verdicts.move_to_end(grammar)
        return verdict

    def _remember(self, grammar: Grammar, verdict: _Verdict) -> None:
        self._verdicts[grammar] = verdict
        self._verdicts.move_to_end(grammar)
        size = sum(len(each.source) for each in self._verdicts)
        while len(self._verdicts) > MOST_VERDICTS or size > MOST_VERDICT_BYTES:
            size -= len(self._verdicts.popitem(last=False)[0].source)
