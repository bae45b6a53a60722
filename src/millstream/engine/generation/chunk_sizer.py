"""How long a chunk of a prompt may be beside running rows: as long as it adds half of the rows' own time to a step.

A prompt then gets a third of the device and running streams keep two thirds of their pace, whatever the model, the
machine and the length of the context. Pure: it is told how long steps took.
"""

from __future__ import annotations

SHARE = 0.5
"""Of the rows' own step, what a chunk may add to one on the average: single ones take longer."""

_QUICK = 0.5
_SLOW = 0.1


class ChunkSizer:
    """`most` and `least` bound the chunk; equal, they fix it. What is left of a prompt is not cut if it is at most
    `most`: short prompts are read whole, several in one pass, which is worth more than a smoother step.
    `free`: seconds that a chunk may add to a step however short that is."""

    def __init__(self, *, most: int, least: int, free: float = 0.0) -> None:
        if not 1 <= least <= most:
            raise ValueError("a chunk has at least one token, and `least` is not above `most`")
        self._most = most
        self._least = least
        self._free = free
        self._step: float | None = None
        self._token: float | None = None
        self._before = 0
        self._deaf = 0
        self._unfinished: list[tuple[int, float]] = []

    def limit(self, left: int) -> int:
        """How much to read at once of a prompt with `left` tokens to go."""
        return left if left <= self._most else self.chunk

    @property
    def chunk(self) -> int:
        """A power of two times `least`: few lengths, so few shapes to compute."""
        if self._step is None or self._token is None or self._token <= 0:
            return self._most
        chunk = self._least
        while chunk * 2 <= min(self._most, max(SHARE * self._step, self._free) / self._token):
            chunk *= 2
        return chunk

    def disturbed(self) -> None:
        """The next step that is told of had other work as well: neither it nor the one after it tells anything."""
        self._deaf = 2

    def observe(self, *, rows: int, prompt_tokens: int, seconds: float, reading: bool = False) -> None:
        """A step of `rows` that also read `prompt_tokens` took `seconds`. `reading`: the next one computes it, too,
        so what counts is their mean.

        A backend may run ahead, so that the cost of a chunk shows in the step after it: both are counted.
        """
        self._unfinished.append((prompt_tokens, seconds))
        if reading and rows:
            return
        prompt_tokens = sum(tokens for tokens, _ in self._unfinished)
        seconds = sum(seconds for _, seconds in self._unfinished) / len(self._unfinished)
        self._unfinished = []
        tokens, self._before = (prompt_tokens + self._before) / 2, prompt_tokens
        if self._deaf:
            self._deaf -= 1
            return
        if not rows or seconds <= 0:
            return
        if not tokens:
            self._step = seconds if self._step is None else self._step + _SLOW * (seconds - self._step)
        elif self._step is not None:
            token = max(0.0, seconds - self._step) / tokens
            if self._token is None:
                self._token = token
            else:
                # Believe at once that tokens grow dearer, and slowly that they grow cheaper: one lucky step must not
                # make the next one long.
                self._token += (_QUICK if token > self._token else _SLOW) * (token - self._token)
