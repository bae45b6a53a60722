"""Decides the length of a prefill chunk while rows decode, from measured step times.

A chunk may add half of the rows' own time to a step. A prompt then gets a third of the device and running streams keep
two thirds of their pace, whatever the model, the machine and the context length. Pure: it is told how long steps took.
"""

from __future__ import annotations

SHARE = 0.5
"""The share of the rows' own step time that a chunk may add on average; single steps take longer."""

_RISING = 0.5
_FALLING = 0.1


class ChunkSizer:
    """`most` and `least` bound a chunk; if equal, they fix it. A remainder of at most `most` tokens is not cut: short
    prompts run in one chunk, several in one pass, which is worth more than a smoother step.
    `free_seconds`: the time that a chunk may add to a step, however short the step is."""

    def __init__(self, *, most: int, least: int, free_seconds: float = 0.0) -> None:
        if not 1 <= least <= most:
            raise ValueError("a chunk has at least one token, and `least` is not above `most`")
        self._most = most
        self._least = least
        self._free_seconds = free_seconds
        self._step: float | None = None
        self._token: float | None = None
        self._last_tokens = 0
        self._skip = 0
        self._partial_steps: list[tuple[int, float]] = []

    def limit(self, left: int) -> int:
        """The longest chunk for a prompt with `left` tokens to go."""
        return left if left <= self._most else self.chunk

    @property
    def chunk(self) -> int:
        """A power of two times `least`: few lengths, so few shapes to compile."""
        if self._step is None or self._token is None or self._token <= 0:
            return self._most
        chunk = self._least
        while chunk * 2 <= min(self._most, max(SHARE * self._step, self._free_seconds) / self._token):
            chunk *= 2
        return chunk

    def skip_steps(self) -> None:
        """The next observed step had other work as well: ignore it and the one after it."""
        self._skip = 2

    def observe(self, *, rows: int, prompt_tokens: int, seconds: float, prefilling: bool = False) -> None:
        """A step of `rows` rows that also prefilled `prompt_tokens` took `seconds`. `prefilling`: the next step goes on
        computing the same chunk, so the mean of the steps counts.

        A backend may run ahead, so the cost of a chunk may show in the step after it: both are counted.
        """
        self._partial_steps.append((prompt_tokens, seconds))
        if prefilling and rows:
            return
        prompt_tokens = sum(tokens for tokens, _ in self._partial_steps)
        seconds = sum(seconds for _, seconds in self._partial_steps) / len(self._partial_steps)
        self._partial_steps = []
        tokens, self._last_tokens = (prompt_tokens + self._last_tokens) / 2, prompt_tokens
        if self._skip:
            self._skip -= 1
            return
        if not rows or seconds <= 0:
            return
        if not tokens:
            self._step = seconds if self._step is None else self._step + _FALLING * (seconds - self._step)
        elif self._step is not None:
            token = max(0.0, seconds - self._step) / tokens
            if self._token is None:
                self._token = token
            else:
                # Follow rising cost quickly and falling cost slowly: one fast step must not make the next chunk long.
                self._token += (_RISING if token > self._token else _FALLING) * (token - self._token)
