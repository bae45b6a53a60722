"""Stop strings: cut a stream of text at the first of them, whatever the chunks.

Each stop string is followed with the Knuth-Morris-Pratt automaton, whose state is the length of the longest tail of
the text that begins the string. That is exactly what must be held back, it costs one step a character, and while
nothing has begun a single `str.find` for the first character does all the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@lru_cache(maxsize=256)
def _borders(stop: str) -> Sequence[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its end. Remembered: all choices
    of a request watch for the same strings."""
    table = [0] * len(stop)
    state = 0
    for place in range(1, len(stop)):
        while state and stop[place] != stop[state]:
            state = table[state - 1]
        if stop[place] == stop[state]:
            state += 1
        table[place] = state
    return table


class _Follower:
    """One stop string and how much of it the end of the text has spelled."""

    __slots__ = ("_borders", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._borders = _borders(stop)

    def feed(self, text: str) -> int | None:
        """Read `text`; where the string completes, the place in `text` after it (the rest is not read)."""
        stop, borders, state = self.stop, self._borders, self.state
        place = 0
        while place < len(text):
            if not state:
                place = text.find(stop[0], place)
                if place < 0:
                    break
            letter = text[place]
            while state and letter != stop[state]:
                state = borders[state - 1]
            if letter == stop[state]:
                state += 1
            place += 1
            if state == len(stop):
                self.state = 0
                return place
        self.state = state
        return None


@dataclass(frozen=True, slots=True, order=True)
class _Match:
    """Ordered by preference: the match that starts first, then the one that ends first."""

    start: int
    length: int
    stop: str


class StopMatcher:
    """Passes text on until a stop string comes; that string and all after it never leave.

    The match that starts first wins, and of several that start at one place the shortest. A complete match therefore
    waits while an earlier, longer one may still complete. Empty stop strings are ignored.
    """

    __slots__ = ("_best", "_firsts", "_followers", "_held", "_seen", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._followers = [_Follower(stop) for stop in dict.fromkeys(stops) if stop]
        self._firsts = {follower.stop[0] for follower in self._followers}
        self._held = ""
        self._seen = 0
        self._best: _Match | None = None

    def push(self, text: str) -> str:
        """The text that is safe to emit now. Empty once a stop string has matched."""
        if self.matched is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            self._seen += len(text)
            return text
        self._follow(text)
        self._held += text
        self._seen += len(text)
        earliest = self._seen - max([follower.state for follower in self._followers], default=0)
        if self._best is not None and self._best.start <= earliest:
            return self._cut(self._best)
        return self._release(earliest)

    def finish(self) -> str:
        """The held-back rest, when the text is over; up to a match that was still waiting for a longer one."""
        if self.matched is not None:
            return ""
        if self._best is not None:
            return self._cut(self._best)
        return self._release(self._seen)

    def _follow(self, text: str) -> None:
        for follower in list(self._followers):
            end = follower.feed(text)
            if end is None:
                continue
            # A later match of the same string starts later: this one is its last word.
            self._followers.remove(follower)
            length = len(follower.stop)
            found = _Match(self._seen + end - length, length, follower.stop)
            self._best = found if self._best is None else min(self._best, found)

    def _cut(self, match: _Match) -> str:
        self.matched = match.stop
        safe = self._release(match.start)
        self._held = ""
        return safe

    def _release(self, until: int) -> str:
        """Let go of the held text before place `until` of the whole."""
        count = len(self._held) - (self._seen - until)
        safe, self._held = self._held[:count], self._held[count:]
        return safe
