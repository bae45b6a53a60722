"""Repetition, presence and frequency penalties for the rows that ask: token counts that live on the device."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from millstream.types import Sampling


def wants_penalties(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


class Penalties:
    """Counts for some rows of a batch. `rows` are their places in it.

    Presence and frequency count what the row wrote; repetition counts its prompt too.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._sampling: list[Sampling] = []
        self._written: mx.array | None = None
        self._prompted: mx.array | None = None
        self._settle()

    def add(self, row: int, sampling: Sampling, prompt: Sequence[int], vocab_size: int) -> None:
        prompted = np.zeros((1, vocab_size), dtype=np.bool_)
        prompted[0, [token for token in prompt if token < vocab_size]] = True
        written = mx.zeros((1, vocab_size), dtype=mx.float32)
        if self._written is None or self._prompted is None:
            self._written, self._prompted = written, mx.array(prompted)
        else:
            self._written = mx.concatenate([self._written, written])
            self._prompted = mx.concatenate([self._prompted, mx.array(prompted)])
        self.rows.append(row)
        self._sampling.append(sampling)
        self._settle()

    def keep(self, places: list[int]) -> None:
        """The batch now has these of its old places, in this order; -1 is a vacant one."""
        where = {old: new for new, old in enumerate(places) if old >= 0}
        kept = [index for index, row in enumerate(self.rows) if row in where]
        if not kept:
            self.rows, self._sampling, self._written, self._prompted = [], [], None, None
        elif self._written is not None and self._prompted is not None:
            chosen = mx.array(kept, dtype=mx.int32)
            self._written, self._prompted = self._written[chosen], self._prompted[chosen]
            self.rows = [where[self.rows[index]] for index in kept]
            self._sampling = [self._sampling[index] for index in kept]
        self._settle()

    def apply(self, logits: mx.array) -> mx.array:
        if self._written is None or self._prompted is None:
            return logits
        logits = logits.astype(mx.float32)
        chosen = logits[self._places]
        was_written = self._written > 0
        repeated = mx.where(chosen > 0, chosen / self._repetition, chosen * self._repetition)
        chosen = mx.where(was_written | self._prompted, repeated, chosen)
        chosen = chosen - self._frequency * self._written - self._presence * was_written
        logits[self._places] = chosen
        return logits

    def count(self, tokens: mx.array) -> None:
        """Book the tokens of a step, one a row of the whole batch."""
        if self._written is not None:
            self._written = self._written.at[mx.arange(len(self.rows)), tokens[self._places]].add(1.0)

    def _settle(self) -> None:
        """Per-row settings as columns: built when rows change, not every step."""
        self._places = mx.array(self.rows, dtype=mx.int32)
        self._repetition = mx.array([[s.repetition_penalty] for s in self._sampling], dtype=mx.float32)
        self._presence = mx.array([[s.presence_penalty] for s in self._sampling], dtype=mx.float32)
        self._frequency = mx.array([[s.frequency_penalty] for s in self._sampling], dtype=mx.float32)
