"""How long a chunk of a prompt may be beside running rows: as long as it makes no step much longer than the rows' own.

A prompt then gets nearly half of the device and slows running streams to about half their pace, whatever the model, the
machine and the length of the context. Pure: it is told how long steps took.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.75
"""Of the rows' own step, what a chunk may add to a step on the average: single ones take longer."""
NEARLY = 1.25
"""Where no chunk is so cheap: how much dearer than the cheapest one may be. What a chunk costs whatever its length is
not saved by a shorter one."""

_QUICK = 0.5
_SLOW = 0.1


@dataclass(slots=True)
class _Chunk:
    """One that is being computed: what it has added so far, and in how many steps."""

    tokens: int
    extra: float = 0.0
    steps: int = 0
    reading: bool = False
    """Whether it is computed in the next step as well."""


class Pace:
    """`most` and `least` bound the chunk; equal, they fix it. What is left of a prompt is not cut if it is at most
    `most`: short prompts are read whole, several in one pass, which is worth more than a smoother step.
    `free`: seconds that a chunk may add to a step however short that is."""

    def __init__(self, *, most: int, least: int, free: float = 0.0) -> None:
        if not 1 <= least <= most:
            raise ValueError("a chunk has at least one token, and `least` is not above `most`")
        self._most = most
        self._free = free
        doubled = (least << power for power in range(most.bit_length()))
        self._lengths = sorted({*(length for length in doubled if length <= most), most})
        self._step: float | None = None
        self._costs: dict[int, float] = {}
        """What a chunk of each length adds to a step, as far as that is known."""
        self._open: _Chunk | None = None
        self._before = 0
        self._deaf = 0

    def limit(self, left: int) -> int:
        """How much to read at once of a prompt with `left` tokens to go."""
        return left if left <= self._most else self.chunk

    @property
    def chunk(self) -> int:
        """One of few lengths, so that there are few shapes to compute."""
        if self._step is None or not self._costs:
            return self._most
        allowed = max(SHARE * self._step, self._free)
        if min(self._costs.values()) > allowed:
            allowed = NEARLY * min(self._costs.values())
        return max(length for length, cost in self._costs.items() if cost <= allowed)

    def disturbed(self) -> None:
        """The next step that is told of had other work as well: neither it nor the one after it tells anything."""
        self._deaf = 2

    def observe(self, *, rows: int, prompt_tokens: int, seconds: float, reading: bool = False) -> None:
        """A step of `rows` that also read `prompt_tokens` took `seconds`. `reading`: the chunk is not done yet.

        A backend may run ahead, so that the cost of a chunk shows in the step after it as well.
        """
        if self._deaf or not rows or seconds <= 0:
            self._deaf = max(0, self._deaf - 1)
            self._open, self._before = None, prompt_tokens
            return
        if prompt_tokens:
            self._close(followed=prompt_tokens)
            self._open = _Chunk(prompt_tokens)
        if self._open is None:
            self._step = seconds if self._step is None else self._step + _SLOW * (seconds - self._step)
            return
        self._open.extra += max(0.0, seconds - (self._step or seconds))
        if not prompt_tokens and not self._open.reading:
            self._close(followed=0)
            return
        self._open.steps += 1
        self._open.reading = reading

    def _close(self, *, followed: int) -> None:
        """A chunk is done. One that followed a longer or a shorter one tells nothing: it paid for that one, too."""
        chunk, self._open = self._open, None
        if chunk is None:
            return
        if self._step is not None and chunk.tokens in self._lengths and self._before in (0, chunk.tokens):
            self._learn(chunk.tokens, chunk.extra / chunk.steps)
        self._before = chunk.tokens if followed else 0

    def _learn(self, tokens: int, cost: float) -> None:
        """Believe at once that chunks grow dearer, and slowly that they grow cheaper: one lucky step must not make the
        next one long. Other lengths are held to what this one says of them: a longer chunk costs at most as many times
        as much as it has times the tokens, and a shorter one at least such a part."""
        known = self._costs.get(tokens, cost)
        cost = known + (_QUICK if cost > known else _SLOW) * (cost - known)
        for length in self._lengths:
            bound = cost * length / tokens
            known = self._costs.get(length, bound)
            self._costs[length] = min(known, bound) if length >= tokens else max(known, bound)
        self._costs[tokens] = cost
