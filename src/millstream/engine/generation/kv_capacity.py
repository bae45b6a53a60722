"""Length classes of the KV cache: how many tokens a row's buffer has room for. Pure.

The backend allocates by these classes and the scheduler counts by them, so that what is admitted is what is allocated.
"""

from __future__ import annotations

SMALLEST = 256
"""Tokens of the smallest class. Up to 2,048 tokens classes are multiples of it; beyond, there are four for each
doubling, so that at most a fifth of a buffer is unused."""


def kv_capacity(tokens: int) -> int:
    """The class of a row that holds so many tokens."""
    step = max(SMALLEST, 1 << max(0, (tokens - 1).bit_length() - 3))
    return max(SMALLEST, -(-tokens // step) * step)


SPARE_TOKENS = 1024
"""The most tokens that a class may have vacant."""


def spare_slots(capacity: int) -> int:
    """How many vacant slots a class may have."""
    return SPARE_TOKENS // capacity


KEPT_TOKENS = 16384
"""The most tokens that all classes together may have vacant besides, where memory is not tight
(`Plan.tight`): so rows need not be moved whenever others leave."""


RING_SLACK, RING_STEP = 32, 32
"""Columns of a ring beyond its window, so that a step may have several tokens per row; and what they are rounded to."""


def ring_capacity(window: int) -> int:
    """Tokens of the slot that a row has in layers with a sliding window, once it is longer than that."""
    return -(-(window + RING_SLACK) // RING_STEP) * RING_STEP


def slot_capacity(tokens: int, window: int) -> int:
    """The class of a row in such layers: that of its tokens, at most the ring. `window` 0: there is none."""
    capacity = kv_capacity(tokens)
    return min(capacity, ring_capacity(window)) if window else capacity
