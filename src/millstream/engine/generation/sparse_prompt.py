"""SpecPrefill: a prompt of which the target reads only the part that a draft model finds important. Pure.

Lossy, and only for requests that allow it. First the draft model reads the whole prompt, chunk by chunk, and the
backend reports how important it finds each piece. Then the target reads the best ones at their true positions, and
always the beginning and the end. What was chosen stays with the request: if it is preempted, it reads the same again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from millstream.model_facts import SpecPrefillFacts

Spans = tuple[tuple[int, int], ...]
"""Parts of a prompt in order: the first position of each, and the one after its last."""

GRID = 32
"""Tokens are chosen in pieces of so many, and chunks are whole pieces."""

BEGINNING, ENDING = 64, 256
"""So many tokens are always read. All attention gathers at the first ones, and the last ones are the question."""


class SparsePrompt:
    """How far the draft model has read a prompt, and what the target reads of it."""

    __slots__ = ("facts", "kept", "scored")

    def __init__(self, facts: SpecPrefillFacts) -> None:
        self.facts = facts
        self.scored = 0
        """Tokens that the draft model has read."""
        self.kept: Spans | None = None
        """What the target reads; None until the backend has told."""

    def select(self, importance: Sequence[float], cached: int, end: int, resumed: int = 0) -> None:
        """Choose from the importance of each piece, counted from the first token. The prefix cache has the first
        `cached` ones; the last `resumed` are output."""
        self.kept = choose(importance, self.facts.share, cached, end, resumed)

    def restart(self) -> None:
        """Its row is gone. What was chosen stays; what the draft has read of an unfinished prompt is gone too."""
        self.scored = 0

    def skipped(self, cached: int, end: int) -> int:
        """Tokens before `end` that the target does not read, if the prefix cache had the first `cached` ones."""
        return end - cached - length(after(self.kept or ((cached, end),), cached, end))

    def work(self, start: int, end: int) -> int:
        """What is left to do, in tokens of the target: it has read up to `start`, and the prompt ends at `end`."""
        if self.kept is not None:
            return length(after(self.kept, start, end))
        scoring = self.facts.cost * (end + 1 - self.scored)
        return math.ceil(scoring + self.facts.share * (end - start))

    def next_scoring(self, budget: int, end: int) -> tuple[int, int] | None:
        """What the draft reads next, if that costs about `budget` tokens of the target. It reads the last token of the
        prompt too. None if it has read all of it."""
        if self.scored > end:
            return None
        tokens = max(GRID, int(budget / max(self.facts.cost, 1e-3)) // GRID * GRID)
        return self.scored, min(end + 1, self.scored + tokens)

    def next_reading(self, start: int, budget: int, end: int) -> Spans:
        """What the target reads next of the prompt from `start` on: about `budget` tokens, in whole pieces."""
        assert self.kept is not None, "nothing was chosen yet"
        left = max(GRID, budget // GRID * GRID)
        found: list[tuple[int, int]] = []
        for first, beyond in after(self.kept, start, end):
            if not left:
                break
            beyond = min(beyond, first + left)
            found.append((first, beyond))
            left -= beyond - first
        return tuple(found)


def choose(importance: Sequence[float], share: float, start: int, end: int, resumed: int = 0) -> Spans:
    """The spans from `start` to `end` that are read: about `share` of these tokens."""
    pieces = range(start // GRID, -(-end // GRID)) if start < end else range(0)
    ending = max(start, end - ENDING - resumed)
    always = {piece for piece in pieces if piece * GRID < BEGINNING or (piece + 1) * GRID > ending}
    wanted = math.ceil(share * (end - start) / GRID)
    others = sorted((piece for piece in pieces if piece not in always), key=lambda piece: -importance[piece])
    spans: list[tuple[int, int]] = []
    for piece in sorted({*always, *others[: max(0, wanted - len(always))]}):
        first, beyond = max(start, piece * GRID), min(end, (piece + 1) * GRID)
        if spans and spans[-1][1] == first:
            first = spans.pop()[0]
        spans.append((first, beyond))
    return tuple(spans)


def length(spans: Sequence[tuple[int, int]]) -> int:
    return sum(beyond - first for first, beyond in spans)


def after(spans: Sequence[tuple[int, int]], start: int, end: int) -> Spans:
    """What spans have from `start` on. All after the last of them up to `end` counts too: the output of a request that
    was preempted was not there when they were chosen."""
    last = spans[-1][1] if spans else 0
    whole = (*spans, (last, end)) if last < end else spans
    return tuple((max(first, start), min(beyond, end)) for first, beyond in whole if beyond > start and first < end)
