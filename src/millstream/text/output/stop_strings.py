"""Matches stop strings in streamed text, independently of how the text is cut into pieces.

Each stop string is matched with the Knuth-Morris-Pratt automaton. Its state is the length of the longest suffix of the
text that is a prefix of the stop string, which is exactly what must be held back. It costs one step per character, and
while no match has begun, a single `str.find` for the first character does all the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@lru_cache(maxsize=256)
def _borders(stop: str) -> Sequence[int]:
    """Returns, for each prefix of `stop`, the length of its longest proper prefix that is also a suffix.

    Cached, because all choices of a request have the same stop strings.
    """
    table = [0] * len(stop)
    state = 0
    for position in range(1, len(stop)):
        while state and stop[position] != stop[state]:
            state = table[state - 1]
        if stop[position] == stop[state]:
            state += 1
        table[position] = state
    return table


class _StopFollower:
    """One stop string, and how many of its characters the text ends with."""

    __slots__ = ("_borders", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._borders = _borders(stop)

    def feed(self, text: str) -> int | None:
        """Consumes `text`. If the string completes, returns the position after it and ignores the rest."""
        stop, borders, state = self.stop, self._borders, self.state
        position = 0
        while position < len(text):
            if not state:
                position = text.find(stop[0], position)
                if position < 0:
                    break
            char = text[position]
            while state and char != stop[state]:
                state = borders[state - 1]
            if char == stop[state]:
                state += 1
            position += 1
            if state == len(stop):
                self.state = 0
                return position
        self.state = state
        return None


@dataclass(frozen=True, slots=True, order=True)
class _Match:
    """A complete match. The order is the preference: first the earliest start, then the shortest."""

    start: int
    length: int
    stop: str


class StopMatcher:
    """Passes text through until a stop string matches. The stop string and all text after it are dropped.

    The match that starts first wins, and of several that start at the same position the shortest. So a complete match
    waits while one that started earlier may still complete. Empty stop strings are ignored.
    """

    __slots__ = ("_best", "_first_chars", "_followers", "_held", "_length", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._followers = [_StopFollower(stop) for stop in dict.fromkeys(stops) if stop]
        self._first_chars = {follower.stop[0] for follower in self._followers}
        self._held = ""
        self._length = 0
        self._best: _Match | None = None

    def push(self, text: str) -> str:
        """Returns the text that is safe to emit now. Empty once a stop string has matched."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_chars.isdisjoint(text):
            self._length += len(text)
            return text
        self._follow(text)
        self._held += text
        self._length += len(text)
        earliest = self._length - max([follower.state for follower in self._followers], default=0)
        if self._best is not None and self._best.start <= earliest:
            return self._cut(self._best)
        return self._release(earliest)

    def finish(self) -> str:
        """Returns the text that is still held back, up to a match that was waiting for an earlier one."""
        if self.matched is not None:
            return ""
        if self._best is not None:
            return self._cut(self._best)
        return self._release(self._length)

    def _follow(self, text: str) -> None:
        for follower in list(self._followers):
            end = follower.feed(text)
            if end is None:
                continue
            # Later matches of the same string start later and cannot win.
            self._followers.remove(follower)
            length = len(follower.stop)
            found = _Match(self._length + end - length, length, follower.stop)
            self._best = found if self._best is None else min(self._best, found)

    def _cut(self, match: _Match) -> str:
        self.matched = match.stop
        safe = self._release(match.start)
        self._held = ""
        return safe

    def _release(self, until: int) -> str:
        """Releases the held-back text before position `until` of the whole text."""
        count = len(self._held) - (self._length - until)
        safe, self._held = self._held[:count], self._held[count:]
        return safe
