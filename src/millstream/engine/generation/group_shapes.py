"""The shapes of prefill passes that several short prompts share, for devices on which a new shape costs time.

The planner chooses how many prompts go together, and counts what their padding costs; the backend pads them. Both
numbers of a shape are powers of two or one and a half times that, so matmuls, which see their product, have few shapes.
"""

from __future__ import annotations

LENGTHS = (32, 64, 96, 128, 192, 256, 384, 512)
"""Columns of a pass. Longer prompts compute for so long that a new shape does not matter."""

MIN_FILL = 0.75
"""The share of a pass's rows that are prompts, at least."""


def padded_length(tokens: int) -> int:
    """The columns of a pass whose longest prompt has so many tokens."""
    return next((length for length in LENGTHS if tokens <= length), tokens)


def padded_rows(prompts: int) -> int:
    """The rows of a pass of so many prompts: a power of two."""
    return 1 << max(0, prompts - 1).bit_length()


def usual_count(prompts: int) -> int:
    """How many of these prompts should share a pass: all of them, unless too many of its rows would be padding."""
    rows = padded_rows(prompts)
    return prompts if prompts >= MIN_FILL * rows else rows // 2


def padded_tokens(prompts: int, longest: int) -> int:
    """What such a pass computes."""
    return padded_rows(prompts) * padded_length(longest)
