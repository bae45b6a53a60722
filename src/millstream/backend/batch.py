"""The rows that decode together, and one step of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from millstream.backend.caches import BatchCaches, RowCaches
from millstream.backend.logprobs import LogprobProbe, LogprobReading
from millstream.backend.penalties import Penalties, wants_penalties
from millstream.backend.sampling import Sampler
from millstream.engine.backend import RowOutput
from millstream.engine.messages import Submit

Forward = Callable[..., mx.array]


class Launched:
    """A decode step on its way through the device."""

    def __init__(self, ids: tuple[int, ...], tokens: mx.array, logprobs: LogprobReading | None) -> None:
        self._ids = ids
        self._tokens = tokens
        self._logprobs = logprobs

    def read(self, alive: set[int]) -> list[RowOutput]:
        """Wait for the step; report the rows that are still there."""
        tokens: list[int] = self._tokens.tolist()  # type: ignore[assignment]
        logprobs = {} if self._logprobs is None else self._logprobs.read(tokens)
        return [
            RowOutput(request_id, (token,), (logprobs[place],) if place in logprobs else ())
            for place, (request_id, token) in enumerate(zip(self._ids, tokens, strict=True))
            if request_id in alive
        ]


class Batch:
    """Owner only, all of it. A row is a request, its caches, and the token it reads next."""

    def __init__(self, forward: Forward, vocab_size: int) -> None:
        self._forward = forward
        self._vocab_size = vocab_size
        self._rows: list[Submit] = []
        self._caches = BatchCaches()
        self._penalties = Penalties()
        self._inputs = mx.zeros((0,), dtype=mx.int32)
        self._positions = mx.zeros((0,), dtype=mx.int32)
        self._sampler = Sampler(())
        self._probe = LogprobProbe(())
        self.ids: tuple[int, ...] = ()

    def join(self, rows: Sequence[tuple[Submit, RowCaches]]) -> None:
        """Rows whose prompt is in their caches but for its last token."""
        if not rows:
            return
        for submit, _ in rows:
            if wants_penalties(submit.sampling):
                self._penalties.add(len(self._rows), submit.sampling, submit.prompt, self._vocab_size)
            self._rows.append(submit)
        self._caches.join([caches for _, caches in rows])
        first = mx.array([submit.prompt[-1] for submit, _ in rows], dtype=mx.int32)
        self._inputs = mx.concatenate([self._inputs, first])
        self._positions = mx.concatenate([self._positions, mx.zeros((len(rows),), dtype=mx.int32)])
        self._settle()

    def drop(self, ids: set[int]) -> None:
        places = [place for place, row in enumerate(self._rows) if row.request_id not in ids]
        if len(places) == len(self._rows):
            return
        self._rows = [self._rows[place] for place in places]
        self._caches.keep(places)
        self._penalties.keep(places)
        chosen = mx.array(places, dtype=mx.int32)
        self._inputs, self._positions = self._inputs[chosen], self._positions[chosen]
        self._settle()

    def launch(self) -> Launched:
        """Start one step and return without waiting: the step's tokens feed the next one on the device."""
        logits = self._forward(self._inputs[:, None], cache=self._caches.layers)[:, -1, :]
        tokens = self._sampler(self._penalties.apply(logits), self._positions)
        self._penalties.count(tokens)
        reading = self._probe(logits, tokens) if self._probe else None
        self._inputs = tokens
        self._positions = self._positions + 1
        mx.async_eval(tokens, self._positions, *(reading.arrays if reading else ()))  # type: ignore[no-untyped-call]
        return Launched(self.ids, tokens, reading)

    def _settle(self) -> None:
        """What depends on who is here, built once per change and not per step."""
        self.ids = tuple(row.request_id for row in self._rows)
        self._sampler = Sampler([row.sampling for row in self._rows])
        self._probe = LogprobProbe([row.logprobs for row in self._rows])
