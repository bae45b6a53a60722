"""Where a draft comes from: its drafter, and for one that looks a text up, how much of the text agreed before it.

A match of two tokens is mostly chance, also in a text that is an edit of the prompt; a longer one goes on. Rates are
learned for both apart: else the drafts right after a change, which are wrong, would be as long as those before it.
"""

from __future__ import annotations

STRONG = 3
"""A match of fewer tokens is weak."""
LOOKUPS = frozenset({"prediction", "prompt-lookup"})
_WEAK = "/weak"


def source_of(drafter: str, agreed: int) -> str:
    """Of a draft after a match of so many tokens."""
    return drafter if agreed >= STRONG else drafter + _WEAK


def sources_of(drafter: str) -> tuple[str, ...]:
    """All that a drafter may have."""
    return (drafter, drafter + _WEAK) if drafter in LOOKUPS else (drafter,)


def drafter_of(source: str) -> str:
    return source.removesuffix(_WEAK)
