"""Greedy decoding of transducers, many rows at a time. mlx-audio decodes one row after the other.

A transducer walks over the encoder's frames. At each it writes a token or a blank, and then moves on: by one frame
after a blank (RNN-T), or by as many as it says itself (TDT). Rows are at different frames, so each has its own time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

MAX_SYMBOLS = 10
"""Tokens at one frame, if the configuration sets no bound: NeMo's default. Else a model could stay for ever."""


@dataclass(slots=True)
class Emitted:
    token: int
    frame: int
    frames: int
    logprob: float


@dataclass(slots=True, eq=False)
class Row:
    features: mx.array
    """Frames by width."""
    frames: int
    frame: int = 0
    symbols: int = 0
    token: int = 0
    """The last one that was written; at first, the blank."""
    emitted: list[Emitted] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.frame >= self.frames


class Transducer:
    """The rows that are being decoded. `durations` is empty for RNN-T."""

    def __init__(self, model: Any, blank: int, durations: Sequence[int], max_symbols: int | None) -> None:
        self._embed = model.decoder.prediction["embed"]
        self._lstm = model.decoder.prediction["dec_rnn"]
        self._joint = model.joint
        self._blank = blank
        self._durations = tuple(durations)
        self._max_symbols = max_symbols or MAX_SYMBOLS
        self._rows: list[Row] = []
        self._features: mx.array | None = None
        """Those of all rows, padded. Made again when rows join or leave."""
        self._state: tuple[mx.array, mx.array] | None = None
        """Layers by rows by width."""

    @property
    def rows(self) -> Sequence[Row]:
        return self._rows

    @property
    def nbytes(self) -> int:
        return sum(row.features.nbytes for row in self._rows) + (0 if self._features is None else self._features.nbytes)

    def add(self, features: mx.array, frames: int) -> Row:
        row = Row(features, frames, token=self._blank)
        zeros = mx.zeros((self._lstm.num_layers, 1, self._lstm.hidden_size), dtype=features.dtype)
        state = (zeros, zeros)
        if self._state is not None:
            state = (mx.concatenate([self._state[0], zeros], 1), mx.concatenate([self._state[1], zeros], 1))
        self._state = state
        self._rows.append(row)
        self._features = None
        return row

    def keep(self, rows: Sequence[Row]) -> None:
        """All others are freed."""
        if len(rows) == len(self._rows):
            return
        order = [number for number, row in enumerate(self._rows) if row in rows]
        self._rows = [self._rows[number] for number in order]
        self._features = None
        if self._state is not None:
            places = mx.array(order, dtype=mx.int32)
            self._state = (self._state[0][:, places], self._state[1][:, places]) if order else None

    def step(self) -> None:
        """One token or blank for every row. None of them may have ended."""
        tokens = mx.array([row.token for row in self._rows])
        frames = mx.array([row.frame for row in self._rows])
        here = self._stacked()[mx.arange(len(self._rows)), frames][:, None]
        embedded = self._embed(tokens[:, None])
        embedded = mx.where((tokens == self._blank)[:, None, None], mx.zeros_like(embedded), embedded)
        written, hidden, cell = self._predict(embedded)
        scores = self._joint(here, written.astype(here.dtype))[:, 0, 0].astype(mx.float32)
        logprobs = scores[:, : self._blank + 1]
        logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
        best = mx.argmax(logprobs, axis=-1)
        sure = mx.take_along_axis(logprobs, best[:, None], axis=-1)[:, 0]
        jumps = mx.argmax(scores[:, self._blank + 1 :], axis=-1) if self._durations else mx.zeros_like(best)
        self._accept(best != self._blank, hidden.astype(here.dtype), cell.astype(here.dtype))
        mx.eval(best, sure, jumps, self._state)
        for row, token, logprob, jump in zip(
            self._rows, np.asarray(best), np.asarray(sure), np.asarray(jumps), strict=True
        ):
            self._write(row, int(token), float(logprob), int(jump))

    def _predict(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """The prediction network. The library's own stack of layers would take the rows for steps in time."""
        assert self._state is not None
        hidden, cell = [], []
        for number, layer in enumerate(self._lstm.lstm):
            x, cells = layer(x, hidden=self._state[0][number], cell=self._state[1][number])
            hidden.append(x[:, -1])
            cell.append(cells[:, -1])
        return x, mx.stack(hidden), mx.stack(cell)

    def _stacked(self) -> mx.array:
        if self._features is None:
            longest = max(row.features.shape[0] for row in self._rows)
            padded = [mx.pad(row.features, [(0, longest - row.features.shape[0]), (0, 0)]) for row in self._rows]
            self._features = mx.stack(padded)
        return self._features

    def _accept(self, wrote: mx.array, hidden: mx.array, cell: mx.array) -> None:
        """A blank leaves the state of its row as it was."""
        assert self._state is not None
        chosen = wrote[None, :, None]
        self._state = (mx.where(chosen, hidden, self._state[0]), mx.where(chosen, cell, self._state[1]))

    def _write(self, row: Row, token: int, logprob: float, jump: int) -> None:
        is_blank = token == self._blank
        frames = self._durations[jump] if self._durations else int(is_blank)
        if not is_blank:
            row.token = token
            row.emitted.append(Emitted(token, row.frame, frames if self._durations else 1, logprob))
        row.symbols += 1
        if frames == 0 and (is_blank or row.symbols >= self._max_symbols):
            frames = 1  # a blank that stays would stay for ever: nothing has changed
        if frames:
            row.frame += frames
            row.symbols = 0
