"""Repetition, presence and frequency penalties, for rows that ask for them: token counts that stay on the device."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from millstream.types import Sampling


def wants_penalties(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


class Penalties:
    """Token counts of the rows with penalties. `rows` are their indices in the batch.

    Presence and frequency penalties count the output tokens of a row; the repetition penalty counts its prompt too.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._sampling: list[Sampling] = []
        self._output_counts: mx.array | None = None
        self._in_prompt: mx.array | None = None
        self._build_columns()

    def add(
        self, row: int, sampling: Sampling, prompt: Sequence[int], vocab_size: int, *, output: Sequence[int] = ()
    ) -> None:
        """`output`: what the row generated before it was preempted."""
        in_prompt = np.zeros((1, vocab_size), dtype=np.bool_)
        in_prompt[0, [token for token in prompt if token < vocab_size]] = True
        counts = mx.array(np.bincount(np.array(output, dtype=np.int64), minlength=vocab_size)[None], dtype=mx.float32)
        if self._output_counts is None or self._in_prompt is None:
            self._output_counts, self._in_prompt = counts, mx.array(in_prompt)
        else:
            self._output_counts = mx.concatenate([self._output_counts, counts])
            self._in_prompt = mx.concatenate([self._in_prompt, mx.array(in_prompt)])
        self.rows.append(row)
        self._sampling.append(sampling)
        self._build_columns()

    def filter(self, layout: list[int]) -> None:
        """Follow the batch to a new layout: the previous index of each row, -1 for a vacant one."""
        if not self.rows:
            return
        moved = {old: new for new, old in enumerate(layout) if old >= 0}
        remaining = [number for number, row in enumerate(self.rows) if row in moved]
        if not remaining:
            self.rows, self._sampling, self._output_counts, self._in_prompt = [], [], None, None
        elif self._output_counts is not None and self._in_prompt is not None:
            chosen = mx.array(remaining, dtype=mx.int32)
            self._output_counts, self._in_prompt = self._output_counts[chosen], self._in_prompt[chosen]
            self.rows = [moved[self.rows[number]] for number in remaining]
            self._sampling = [self._sampling[number] for number in remaining]
        self._build_columns()

    def apply(self, logits: mx.array) -> mx.array:
        if self._output_counts is None or self._in_prompt is None:
            return logits
        logits = logits.astype(mx.float32)
        columns = (self._in_prompt, self._repetition, self._presence, self._frequency)
        logits[self._indices] = _penalise(logits[self._indices], self._output_counts, *columns)
        return logits

    def apply_to_drafts(self, logits: mx.array, drafts: mx.array) -> mx.array:
        """To the logits of a pass of several tokens per row: (rows, length, vocabulary). `drafts` (rows, length - 1):
        what each position but the first reads. A position counts the drafts before it; `count_tokens` counts what
        became of them."""
        if self._output_counts is None or self._in_prompt is None:
            return logits
        logits = logits.astype(mx.float32)
        length = logits.shape[1]
        counts = mx.repeat(self._output_counts[:, None], length, axis=1)
        for position in range(1, length):
            token = drafts[self._indices, position - 1][:, None]
            later = mx.arange(position, length)
            counts = counts.at[mx.arange(len(self.rows))[:, None], later[None], token].add(1.0)
        columns = [each[:, None] for each in (self._in_prompt, self._repetition, self._presence, self._frequency)]
        logits[self._indices] = _penalise(logits[self._indices], counts, *columns)
        return logits

    def count(self, tokens: mx.array) -> None:
        """Count the tokens of a step, one per row of the whole batch."""
        if self._output_counts is not None:
            self._output_counts = self._output_counts.at[mx.arange(len(self.rows)), tokens[self._indices]].add(1.0)

    def count_tokens(self, tokens: Sequence[Sequence[int]]) -> None:
        """Count what each row of the whole batch has gained."""
        if self._output_counts is None:
            return
        gained = [(number, token) for number, row in enumerate(self.rows) for token in tokens[row]]
        numbers, values = (mx.array(each, dtype=mx.int32) for each in zip(*gained, strict=True))
        self._output_counts = self._output_counts.at[numbers, values].add(1.0)

    def _build_columns(self) -> None:
        """Build the settings of all rows as columns, when rows change rather than every step."""
        self._indices = mx.array(self.rows, dtype=mx.int32)
        self._repetition = mx.array([[s.repetition_penalty] for s in self._sampling], dtype=mx.float32)
        self._presence = mx.array([[s.presence_penalty] for s in self._sampling], dtype=mx.float32)
        self._frequency = mx.array([[s.frequency_penalty] for s in self._sampling], dtype=mx.float32)


def _penalise(
    logits: mx.array,
    counts: mx.array,
    in_prompt: mx.array,
    repetition: mx.array,
    presence: mx.array,
    frequency: mx.array,
) -> mx.array:
    in_output = counts > 0
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(in_output | in_prompt, repeated, logits)
    return logits - frequency * counts - presence * in_output
