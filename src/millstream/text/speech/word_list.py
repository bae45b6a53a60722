"""Lists of words that are easy to read and to change."""

from __future__ import annotations


def listed(text: str) -> frozenset[str]:
    return frozenset(text.split())
