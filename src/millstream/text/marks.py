"""Markers in a text that is still coming."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Marks:
    """Finds the first of some markers; of several at one place, the longest."""

    __slots__ = ("_firsts", "_longest", "_pattern", "_texts")

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = tuple(sorted({text for text in texts if text}, key=lambda text: (-len(text), text)))
        self._firsts = frozenset(text[0] for text in self._texts)
        self._longest = len(self._texts[0]) if self._texts else 0
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")

    def __bool__(self) -> bool:
        return bool(self._texts)

    def find(self, text: str, *, final: bool, start: int = 0) -> tuple[int, str]:
        """The place of the first marker, and the marker; or the place where one may be beginning, and nothing."""
        found = self._pattern.search(text, start)
        waiting = len(text) if final else self._beginning(text, start)
        # A marker at the place where a longer one may still be coming waits for it.
        return (found.start(), found[0]) if found and found.start() < waiting else (waiting, "")

    def _beginning(self, text: str, start: int) -> int:
        first = max(start, len(text) - self._longest + 1)
        if self._firsts.isdisjoint(text[first:]):
            return len(text)
        for place in range(first, len(text)):
            tail = text[place:]
            if any(len(mark) > len(tail) and mark.startswith(tail) for mark in self._texts):
                return place
        return len(text)
