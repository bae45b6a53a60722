"""Finds markers in text that is still streaming in."""

from __future__ import annotations

import re
from collections.abc import Iterable


class MarkerFinder:
    """Finds the first of several markers; of markers that start at the same position, the longest."""

    __slots__ = ("_first_chars", "_longest", "_markers", "_pattern")

    def __init__(self, markers: Iterable[str]) -> None:
        distinct = {marker for marker in markers if marker}
        self._markers = tuple(sorted(distinct, key=lambda marker: (-len(marker), marker)))
        self._first_chars = frozenset(marker[0] for marker in self._markers)
        self._longest = len(self._markers[0]) if self._markers else 0
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or r"(?!)")

    def __bool__(self) -> bool:
        return bool(self._markers)

    def find(self, text: str, *, final: bool, start: int = 0) -> tuple[int, str]:
        """Returns the position of the first marker and the marker.

        If there is none, returns the position from which the text may be the start of one, and an empty string.
        `final`: no more text will follow.
        """
        found = self._pattern.search(text, start)
        partial = len(text) if final else self._partial_marker(text, start)
        # A marker that may still grow into a longer one at the same position waits.
        return (found.start(), found[0]) if found and found.start() < partial else (partial, "")

    def _partial_marker(self, text: str, start: int) -> int:
        first = max(start, len(text) - self._longest + 1)
        if self._first_chars.isdisjoint(text[first:]):
            return len(text)
        for position in range(first, len(text)):
            tail = text[position:]
            if any(len(marker) > len(tail) and marker.startswith(tail) for marker in self._markers):
                return position
        return len(text)
