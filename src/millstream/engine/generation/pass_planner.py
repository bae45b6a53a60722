"""Decides what a step prefills where prompts share passes from any offset: one cost in seconds, and one budget.

How much a pass costs for several prompts is measured: for matmuls as much as one prompt of all their tokens, for layers
that go through a prompt column by column hardly more than one of them. So a pass has as many of the oldest prompts as
raise the tokens per second, and as many tokens of each as the budget allows. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from millstream.engine.generation.pass_cost import PassCost
from millstream.engine.generation.plan import Plan, Prefill, StepResult
from millstream.engine.generation.prefill_chunks import Admit
from millstream.engine.generation.prefill_planner import NOTHING, PlannedPrefill, PrefillPlanner, _unfinished
from millstream.engine.generation.request import Request, State
from millstream.model_facts import Calibration

MOST_PROMPTS, MOST_TOKENS = 16, 4096
"""Of a pass, and of all its prompts together: its activations take memory."""

WORTH = 0.9
"""Fewer prompts than those with the most tokens per second share a pass if they reach this share of it: the first of
them answer sooner."""

GENTLE, MOST_PARTS = 0.5, 8
"""While nobody waits long, a step takes so much of its rows' own time longer, and a pass may span so many steps."""

MARGIN = 0.9
"""How much of the longest gap a pass is planned for: steps differ."""


@dataclass(frozen=True, slots=True)
class SharedPass:
    """So many prompts, each with up to so many tokens."""

    prompts: int
    tokens: int
    seconds: float


class ReadCost:
    """Seconds of a pass by its prompts and the tokens of each."""

    def __init__(self, measured: Calibration) -> None:
        assert measured.together is not None
        self._one = PassCost(measured.chunks)
        self.lengths = [tokens for tokens, _ in measured.chunks]
        prompts, tokens, seconds = measured.together
        alone, as_one = self._one.seconds(tokens), self._one.seconds(prompts * tokens)
        self._share = min(1.0, max(0.0, (seconds - alone) / (as_one - alone))) if as_one > alone else 1.0
        """What further prompts cost, of as many tokens in one prompt."""

    def seconds(self, prompts: int, tokens: int) -> float:
        alone = self._one.seconds(tokens)
        return alone + self._share * (self._one.seconds(prompts * tokens) - alone)

    def best(self, left: Sequence[int], seconds: float, most_tokens: int) -> SharedPass:
        """Over the oldest prompts, which have so many tokens left: at least one of them, with at least the shortest
        chunk, and in this time if that is possible. `most_tokens`: of each."""
        found: list[tuple[float, SharedPass]] = []
        for prompts in range(1, min(len(left), MOST_PROMPTS) + 1):
            longest = max(1, max(left[:prompts]))
            most = most_tokens if prompts == 1 else min(most_tokens, MOST_TOKENS // prompts)
            lengths = [min(each, longest) for each in self.lengths if each <= most] or [self.lengths[0]]
            if longest <= most:
                lengths.append(longest)
            fitting = [each for each in lengths if self.seconds(prompts, each) <= seconds]
            if prompts > 1 and not fitting:
                break
            tokens = max(fitting, default=lengths[0])
            cost = self.seconds(prompts, tokens)
            read = sum(max(1, min(each, tokens)) for each in left[:prompts])
            found.append((read / cost, SharedPass(prompts, tokens, cost)))
        best = max(rate for rate, _ in found)
        return next(each for rate, each in found if rate >= WORTH * best)

    def observe(self, chunks: Sequence[Prefill], seconds: float, decode: float, *, prefilling: bool) -> None:
        """A step with these chunks, and `decode` seconds of its rows' own time, took so long."""
        tokens = 0
        if chunks:
            expected = self.seconds(len(chunks), max(max(1, chunk.tokens) for chunk in chunks))
            tokens = max(1, self._one.tokens_in(expected))
        self._one.observe(tokens=tokens, seconds=seconds, decode=decode, prefilling=prefilling)

    def forget(self) -> None:
        """What is counted now had other work beside it."""
        self._one.forget()


class PassPlanner(PrefillPlanner):
    """Prompts with media, with log-probabilities or read in part are planned as elsewhere."""

    def __init__(self, measured: Calibration, *args: object, **options: object) -> None:
        """`args`, `options`: see `PrefillPlanner`."""
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._cost = ReadCost(measured)
        self._long_last = False
        """Whether the last pass was over a prompt that needs several."""

    def plan(
        self,
        prefilling: Sequence[Request],
        waiting: Iterable[Request],
        admit: Admit,
        *,
        rows: int,
        joining: bool = False,
    ) -> PlannedPrefill:
        queue = [*_unfinished(prefilling), *islice(waiting, MOST_PROMPTS)]
        decode = self._sizer.decode(rows) if rows else 0.0
        if decode is None or any(_is_special(request) for request in (*prefilling, *queue)):
            return super().plan(prefilling, queue[len(_unfinished(prefilling)) :], admit, rows=rows, joining=joining)
        self._sizer.rows = max(1, rows)
        if not queue or (rows and self._chunk_pending):
            return NOTHING
        pressed = bool(rows) and self._is_pressed(queue, rows)
        if joining and not pressed:
            return NOTHING  # what joins costs the host as much as building a pass: not in one step
        if not rows:
            budget = math.inf
        elif pressed:
            budget = MARGIN * self._sizer.max_gap - decode
        else:
            budget = MOST_PARTS * GENTLE * decode
        queue = self._in_turns(queue, budget)
        chosen = self._cost.best([self._chunks.left(request) for request in queue], budget, self._prefill_tokens)
        chunks = list(self._take(queue[: chosen.prompts], admit, chosen.tokens))
        self._long_last = any(not chunk.joins for chunk in chunks)
        if not rows or pressed:
            return PlannedPrefill(chunks, complete=bool(rows) and bool(chunks))
        return PlannedPrefill(chunks, parts=max(2, min(MOST_PARTS, math.ceil(chosen.seconds / (GENTLE * decode)))))

    def _is_pressed(self, queue: Sequence[Request], rows: int) -> bool:
        """Whether prompts go before the pace of the rows: half as many wait as run, or one has lost its patience."""
        return 2 * len(queue) >= rows or self.clock - queue[0].arrived > self._patience

    def _in_turns(self, queue: Sequence[Request], budget: float) -> list[Request]:
        """Short prompts, which need one pass, go before a long one every second time."""
        if not self._long_last:
            return list(queue)
        fits = [
            request
            for request in queue
            if (left := self._chunks.left(request)) <= self._prefill_tokens and self._cost.seconds(1, left) <= budget
        ]
        return fits or list(queue)

    def _take(self, requests: Sequence[Request], admit: Admit, tokens: int) -> Iterable[Prefill]:
        for request in requests:
            chunks = list(self._chunks.fill([request], admit, tokens))
            if not chunks and request.state is State.WAITING:
                return  # there is no room for it, and nobody overtakes it
            yield from chunks

    def observe(self, plan: Plan, result: StepResult, seconds: float) -> None:
        super().observe(plan, result, seconds)
        decode = self._sizer.decode(len(plan.decode)) if plan.decode else None
        if decode is None or plan.encode or result.length > 1:
            self._cost.forget()
        else:
            self._cost.observe(plan.prefill, seconds, decode, prefilling=result.prefilling)

    def reset(self) -> None:
        super().reset()
        self._cost.forget()


def _is_special(request: Request) -> bool:
    return bool(request.submit.media) or request.sparse is not None or request.submit.prompt_logprobs is not None
