"""Drafts from a row's own context: what followed the last time that its latest tokens stood there.

Edits of a file, quotes, tool calls and lists repeat what the prompt or the answer has said already.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

LONGEST, SHORTEST = 6, 2
"""How many of the latest tokens must have stood together before: the longest run that is found counts."""
_CODE = "I"
_WIDTH = array(_CODE).itemsize


class PromptLookup:
    """The context of one row, searched by bytes: the search itself runs at the memory's pace, not at Python's."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = bytearray(array(_CODE, tokens).tobytes())

    def __len__(self) -> int:
        return len(self._tokens) // _WIDTH

    def append(self, tokens: Iterable[int]) -> None:
        self._tokens += array(_CODE, tokens).tobytes()

    def draft(self, count: int) -> tuple[int, ...]:
        """Up to `count` tokens that may come next; none if the latest tokens are new."""
        size = len(self)
        for length in range(min(LONGEST, size - 1), SHORTEST - 1, -1):
            at = self._find(self._tokens[-length * _WIDTH :], len(self._tokens) - _WIDTH)
            if at is not None:
                begin = at + length * _WIDTH
                found = array(_CODE)
                found.frombytes(bytes(self._tokens[begin : begin + count * _WIDTH]))
                return tuple(found)
        return ()

    def _find(self, pattern: bytearray, end: int) -> int | None:
        """Where `pattern` begins last, before `end`, at a whole token."""
        while (at := self._tokens.rfind(pattern, 0, end)) >= 0:
            if at % _WIDTH == 0:
                return at
            end = at + len(pattern) - 1
        return None
