"""Admission by tokens: what the rows' KV caches take, what the next step may need, whether one more request fits. Pure.

Memory is counted in tokens. A request is admitted when its prompt fits beside what runs, not when everything that it
may generate does: rows that outgrow the budget are preempted (see `scheduler.py`). So each step is checked before it
is planned, and at its worst moment: a row that grows or joins is copied, and exists twice until the copy is done.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto
from typing import Literal, NamedTuple, Protocol

from millstream.engine.generation.kv_capacity import SMALLEST, SPARE_TOKENS, kv_capacity, slot_capacity, spare_slots

LayoutName = Literal["classes", "rectangle"]

AHEAD = 2
"""Tokens that a row may have in its KV cache beyond those that were reported: the backend runs a step ahead."""

PADDING_TOKENS = 512
"""The most padding that the KV cache of a prompt in prefill has."""

MERGED_TOKENS = 16384
"""Tokens that exist twice while slabs of a class are merged or emptied. In a small budget, `MERGED_SHARE` of it."""

MERGED_SHARE = 1 / 8

COLUMNS = 256
"""A rectangle has a multiple of so many columns, and half as many to spare when it is made."""

CHUNK_TOKENS = 8192
"""The longest chunk: while it is prefilled, a sliding window holds it beside its own tokens."""

HORIZON = 64
"""A request is admitted only if all rows could generate so many more tokens: else it might be preempted at once."""

PROMPT_PER_STEP = 64
"""And one more for so many tokens of its prompt: rows go on while it is prefilled."""

SURE_TOKENS = (64, 8)
"""If the rows fit as they will be with so many more tokens each, the steps between are not checked."""


class Phase(Enum):
    PREFILLING = auto()
    """Its KV cache is its own, with room for the whole prompt."""
    JOINING = auto()
    """It joins the batch in the next step."""
    DECODING = auto()


class Row(NamedTuple):
    """What the budget knows of a request: `tokens` is its prompt and what it has generated."""

    tokens: int
    phase: Phase


class Layout(Protocol):
    """How the KV caches of rows lie in memory."""

    def step(self, rows: Sequence[Row], ahead: int) -> int:
        """The most tokens that these rows take at any moment of a step, or of all steps until each has `ahead` more."""
        ...

    def later(self, rows: Sequence[Row], ahead: int) -> int:
        """What they take when all have joined and have `ahead` more tokens, while one of them is copied."""
        ...


Windows = tuple[tuple[int, float], ...]
"""Sliding windows, and their layers' part of what a token takes while a row is shorter."""


class LengthClasses:
    """Each row has a slot of its length class, and a class has some vacant slots. Where layers have a window, its slot
    is at most the window's ring."""

    def __init__(self, windows: Windows = ()) -> None:
        self._windows = windows

    def step(self, rows: Sequence[Row], ahead: int) -> int:
        prompts = 0
        slots: Counter[int] = Counter()
        joining: list[tuple[int, int]] = []
        for row in rows:
            now, grown = kv_capacity(row.tokens), kv_capacity(row.tokens + ahead)
            if row.phase is Phase.DECODING:
                # A row that has verified drafts has not computed its last token, which may need the next class.
                slots.update({kv_capacity(max(1, row.tokens - 1)), grown})
            else:
                prompts += self._prompt(now) + PADDING_TOKENS
            if row.phase is Phase.JOINING:
                joining.append((now, grown))
        # Those that join stand in the smaller class first, which may take more for its vacant slots.
        moments = [Counter(each) for each in zip(*joining, strict=True)] or [Counter()]
        return prompts + max(self._slabs(slots + moment) for moment in moments)

    def later(self, rows: Sequence[Row], ahead: int) -> int:
        slots = Counter(kv_capacity(row.tokens + ahead) for row in rows)
        prompts = sum(row.phase is not Phase.DECODING for row in rows)
        return self._slabs(slots) + prompts * PADDING_TOKENS + max(slots, default=0)

    def _slabs(self, slots: Counter[int]) -> int:
        whole = _with_spare(slots)
        saved = 0.0
        for window, part in self._windows:
            rings: Counter[int] = Counter()
            for capacity, rows in slots.items():
                rings[slot_capacity(capacity, window)] += rows
            saved += part * max(0, whole - _with_spare(rings))
        return whole - int(saved)

    def _prompt(self, capacity: int) -> int:
        """A prompt in prefill. A window's tokens are copied for each chunk."""
        saved = sum(part * max(0, capacity - 2 * (window + CHUNK_TOKENS)) for window, part in self._windows)
        return capacity - int(saved)


def _with_spare(slots: Counter[int]) -> int:
    return sum(capacity * (rows + spare_slots(capacity)) for capacity, rows in slots.items())


class Rectangle:
    """All rows are as long as the longest. The memory that copies need is not in the budget (`facts.tokens_in`)."""

    def step(self, rows: Sequence[Row], ahead: int) -> int:
        return self.later(rows, ahead)

    def later(self, rows: Sequence[Row], ahead: int) -> int:
        longest = max((row.tokens for row in rows), default=0)
        return len(rows) * -(-(longest + ahead + COLUMNS // 2) // COLUMNS) * COLUMNS


def _layout(name: LayoutName, windows: Windows) -> Layout:
    return LengthClasses(windows) if name == "classes" else Rectangle()


class KvBudget:
    """`tokens`: how many fit into memory beside everything else; None: no bound."""

    def __init__(self, tokens: int | None, layout: LayoutName = "classes", windows: Windows = ()) -> None:
        self.bounded = tokens is not None
        self._layout = _layout(layout, windows)
        merged = 0 if layout == "rectangle" else min(MERGED_TOKENS, int(MERGED_SHARE * (tokens or 0)))
        self._tokens = (tokens or 0) - merged

    def fits(self, rows: Sequence[Row], ahead: int = AHEAD) -> bool:
        """Whether the next step of these rows fits, at its worst moment."""
        return not self.bounded or self._layout.step(rows, ahead) <= self._tokens

    def has_plenty(self, rows: int, longest: int, vacant: int = 0) -> bool:
        """True if so many rows surely fit, whatever their phases and classes, until the longest has so many tokens,
        beside so many that are vacant. Much quicker than to count them."""
        capacity = kv_capacity(longest + AHEAD)
        most = rows * (3 * capacity + PADDING_TOKENS) + SPARE_TOKENS * SPARE_TOKENS // SMALLEST + capacity
        return not self.bounded or most + vacant <= self._tokens

    def sure_tokens(self, rows: Sequence[Row]) -> int:
        """By how many more tokens each row may surely grow after the next step, if no row is added and no prompt is
        completed."""
        # Rows that join stand in the class of their prompt first: its vacant slots count as well.
        joining = [Row(row.tokens, Phase.DECODING) for row in rows if row.phase is Phase.JOINING]
        prompts = [Row(row.tokens, Phase.PREFILLING) for row in rows if row.phase is Phase.JOINING]
        together = [*(row for row in rows if row.phase is not Phase.JOINING), *joining, *prompts]
        return next((tokens for tokens in SURE_TOKENS if self.fits(together, AHEAD + tokens)), 0)

    def admits(self, rows: Sequence[Row], prompt: int) -> bool:
        """Whether a request with a prompt of so many tokens may start beside these rows."""
        if not self.bounded or not rows:
            return True
        together = [*rows, Row(prompt, Phase.PREFILLING)]
        later = self._layout.later(together, HORIZON + prompt // PROMPT_PER_STEP)
        return self.fits(together) and later <= self._tokens

    def longest_row(self, most: int) -> int:
        """How long one row may become, up to `most`, so that it can always start again by itself."""
        if not self.bounded:
            return most
        return bisect.bisect_right(range(1, most + 1), self._tokens, key=lambda tokens: _alone(tokens, self._layout))


def _alone(tokens: int, layout: Layout) -> int:
    """The most that one row ever takes until it has so many tokens, if it may start again at any length."""
    moments = [Row(tokens, Phase.JOINING)]
    capacity = kv_capacity(1)
    while capacity < tokens + AHEAD:
        moments.append(Row(capacity, Phase.DECODING))
        # With windows, a shorter row that joins may take more than a longer one: those before the end of a class, which
        # stay in it for now, and those at its end.
        moments += [Row(each, Phase.JOINING) for each in (capacity - AHEAD, capacity) if each <= tokens]
        capacity = kv_capacity(capacity + 1)
    return max(layout.step([moment], AHEAD) for moment in moments)


def tokens_for_row(tokens: int, layout: LayoutName = "classes", windows: Windows = ()) -> int:
    """The smallest budget in which one row may become so long."""
    needed = _alone(tokens, _layout(layout, windows))
    if layout == "rectangle":
        return needed
    return min(needed + MERGED_TOKENS, -int(-needed // (1 - MERGED_SHARE)))
