"""The lengths that a verifying pass may have: few, because each is compiled and its cost learned by itself."""

from __future__ import annotations

LENGTHS = (1, 2, 3, 5, 9, 17)
"""Tokens per row of a pass: a row's next input and a draft. 1: a plain step."""
LONG_ROWS = 4
"""The longest passes are for so few rows."""


def longest_pass(rows: int) -> int:
    """Tokens per row of the longest pass of so many rows."""
    return LENGTHS[-1] if rows <= LONG_ROWS else LENGTHS[-2]


def pass_length(draft: int) -> int:
    """The shortest pass that takes a draft of so many tokens."""
    return next(length for length in LENGTHS if length > draft)
