"""Decides how many short prompts share a prefill pass beside running rows, and over how many steps it spreads. Pure.

A pass that one step computes makes one long gap for every row that runs; streams should see few of them. So it is for
prompts that are many against the rows: when streams start together, passes grow, and few rows run while most are read.
All other passes spread over steps, each a few decode steps long at most: no gap is long, and prompts answer a little
later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.engine.generation.decode_cost import DecodeCost
from millstream.engine.generation.pass_cost import PassCost

CROWD = 2
"""So many times as many prompts as rows are read in one step: starting N streams then makes N / 2 long gaps at most."""

FEW = 4
"""Prompts that are so many times fewer than the rows do not wait for others: many streams do not start so."""

STRETCH = 2.3
"""How many decode steps a step may take that computes a part of a pass: streams must see less than three times their
usual gap, and steps differ."""

MOST_PARTS = 8
"""Steps that compute a pass, at most."""

GATHERING, GATHERING_GAPS = 10, 2
"""For how many decode steps, and longest gaps, short prompts may wait for others: each pass has a fixed cost."""

PAUSE = 2
"""So many decode steps without a new prompt end the wait."""

MARGIN = 0.9
"""How much of the longest gap a pass is planned for: steps differ."""


@dataclass(frozen=True, slots=True)
class ShortPass:
    """So many of the oldest prompts share a pass. `parts`: the steps that compute it after the one that builds it; 0:
    that one computes it too."""

    count: int
    parts: int = 0


class ShortPrompts:
    """For devices whose passes can span steps, with costs that were measured at load."""

    def __init__(self, decode: DecodeCost, passes: PassCost, *, max_gap: float, most_tokens: int) -> None:
        """`most_tokens`: of a pass."""
        self._decode = decode
        self._passes = passes
        self._max_gap = max_gap
        self._most_tokens = most_tokens

    def choose(self, lengths: Sequence[int], rows: int, tokens_per_second: float = 0.0) -> ShortPass:
        """The next pass over prompts with so many tokens left, oldest first, beside so many rows: at least one, and as
        fast as this pace, as far as the longest gap allows. A count of 0: not even the first one fits."""
        decode = self._decode.seconds(rows) or 0.0
        at_once = self._fitting(lengths, self._passes.tokens_in(MARGIN * self._max_gap - decode))
        gentle = self._fitting(lengths, self._passes.tokens_in((STRETCH - 1) * decode))
        if gentle == len(lengths):
            return ShortPass(gentle)
        if len(lengths) >= CROWD * rows and CROWD * at_once >= min(rows, len(lengths)):
            return ShortPass(at_once)
        seconds = STRETCH * decode
        while True:
            step = min(seconds, MARGIN * self._max_gap)
            count = self._fitting(lengths, self._passes.tokens_in(MOST_PARTS * (step - decode)))
            tokens = sum(lengths[:count])
            if step < seconds or (count and tokens >= tokens_per_second * (MOST_PARTS + 1) * step):
                break
            seconds *= STRETCH
        parts = math.ceil(self._passes.seconds(tokens) / max(step - decode, 1e-9))
        return ShortPass(count, max(1, min(MOST_PARTS, parts)))

    def tokens(self, rows: int) -> int:
        """How many tokens of short prompts a pass beside so many rows may have that spreads over steps."""
        decode = self._decode.seconds(rows) or 0.0
        return min(self._most_tokens, self._passes.tokens_in(MOST_PARTS * (STRETCH - 1) * decode))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that is short: one step may read it."""
        return min(self._most_tokens, self._passes.tokens_in(MARGIN * self._max_gap))

    def gathers(self, count: int, rows: int, waited: float, since_last: float) -> bool:
        """Whether so many prompts should wait for others that share their pass. `waited`: the oldest, and `since_last`:
        the youngest, in seconds."""
        decode = self._decode.seconds(rows) or 0.0
        if count * FEW <= rows or count >= CROWD * rows or since_last > PAUSE * decode:
            return False
        return waited < min(GATHERING * decode, GATHERING_GAPS * self._max_gap)

    def _fitting(self, lengths: Sequence[int], tokens: int) -> int:
        """How many of the first prompts a pass of so many tokens has."""
        limit = min(tokens, self._most_tokens)
        for count, length in enumerate(lengths):
            limit -= max(1, length)
            if limit < 0:
                return count
        return len(lengths)
