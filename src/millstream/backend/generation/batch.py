"""The rows that decode together, and one step of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.batch_caches import BatchCaches
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.sampling.guides import Compiler, GrammarGuides, TokenMask
from millstream.backend.generation.sampling.logprobs import PendingLogprobs, RowLogprobs
from millstream.backend.generation.sampling.penalties import Penalties, wants_penalties
from millstream.backend.generation.sampling.sampler import Sampler
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import RowFailure, RowOutput
from millstream.engine.prefix_cache.orders import SavePrefix
from millstream.types import Sampling

Forward = Callable[..., mx.array]
Shift = Callable[[Generate], int]

VACANT = Sampling()
"""How a place without a row samples: greedily, which costs least. Nobody reads it."""


class Launched:
    """A decode step on its way through the device."""

    def __init__(self, ids: tuple[int | None, ...], tokens: mx.array, logprobs: PendingLogprobs | None) -> None:
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
            if request_id is not None and request_id in alive
        ]


class Batch:
    """Owner only, all of it. A row is a request, its caches, and the token it reads next; a place may be vacant."""

    def __init__(
        self,
        forward: Forward,
        vocab_size: int,
        caches: BatchCaches[Any],
        *,
        kernel: bool = False,
        compiler: Compiler | None = None,
        shift: Shift | None = None,
    ) -> None:
        """`kernel`: sample with our CUDA kernel. `compiler`: for rows with a grammar. `shift`: how much further a row's
        positions are than its tokens."""
        self._shift = shift
        self._shifts: dict[str, mx.array] = {}
        self._forward = forward
        self._kernel = kernel
        self._vocab_size = vocab_size
        self._rows: list[Generate | None] = []
        self._caches = caches
        self._penalties = Penalties()
        self._guides = GrammarGuides(compiler, vocab_size)
        self._inputs = mx.zeros((0,), dtype=mx.int32)
        self._positions = mx.zeros((0,), dtype=mx.int32)
        self._sampler = Sampler(())
        self._probe = RowLogprobs(())
        self.ids: set[int] = set()
        self._launches = 0
        self._joined: dict[int, int] = {}
        """How many launches there had been when a row joined."""

    def join(self, submits: Sequence[Generate], joining: Sequence[Any]) -> None:
        """Rows whose prompt is read but for its last token. `joining` is what the caches take, in the same order."""
        if not submits:
            return
        places = self._caches.join(joining)
        grown = self._caches.size - len(self._rows)
        self._rows += [None] * grown
        fresh = mx.zeros((grown,), dtype=mx.int32)
        self._inputs = mx.concatenate([self._inputs, fresh])
        self._positions = mx.concatenate([self._positions, fresh])
        for place, submit in zip(places, submits, strict=True):
            self._rows[place] = submit
            self._joined[submit.request_id] = self._launches
            self._guides.add(submit)
            if wants_penalties(submit.sampling):
                self._penalties.add(place, submit.sampling, submit.prompt, self._vocab_size)
        chosen = mx.array(places, dtype=mx.int32)
        self._inputs[chosen] = mx.array([submit.prompt[-1] for submit in submits], dtype=mx.int32)
        self._positions[chosen] = mx.zeros((len(places),), dtype=mx.int32)
        self._settle()

    def drop(self, ids: set[int]) -> None:
        if not ids & self.ids:
            return
        self._guides.drop(ids)
        keep = [place for place, row in enumerate(self._rows) if row is not None and row.request_id not in ids]
        living = set(keep)
        rows = [row if place in living else None for place, row in enumerate(self._rows)]
        layout = self._caches.filter(keep)
        if layout != list(range(len(rows))):
            moved = mx.array(layout, dtype=mx.int32)
            self._inputs, self._positions = self._inputs[moved], self._positions[moved]
        self._penalties.filter([place if place in living else -1 for place in layout])
        self._rows = [rows[place] if place >= 0 else None for place in layout]
        for request_id in ids & self.ids:
            del self._joined[request_id]
        self._settle()

    def save(self, order: SavePrefix, kept: PrefixStore) -> list[mx.array] | None:
        """Have `kept` hold what `order` says of a row. To be evaluated; None if the row is at another place."""
        if order.checkpoint is not None and self._tokens_read(order.request_id) != order.tokens:
            return None
        return self._caches.save(self._ids.index(order.request_id), order, kept)

    def _tokens_read(self, request_id: int) -> int:
        row = self._rows[self._ids.index(request_id)]
        assert row is not None
        return len(row.prompt) - 1 + self._launches - self._joined[request_id]

    @property
    def nbytes(self) -> int:
        """What its caches take."""
        return self._caches.nbytes

    @property
    def guided(self) -> bool:
        """Whether a step needs `guide` between its two halves."""
        return bool(self._guides)

    def forward(self) -> mx.array:
        """The first half of a step: its logits, still lazy."""
        self._launches += 1
        self._caches.begin_step()
        logits = self._forward(self._inputs[:, None], cache=self._caches.layers, **self._shifts)[:, -1, :]
        self._caches.end_step()
        return logits

    def guide(self, rows: Sequence[RowOutput]) -> tuple[TokenMask | None, list[RowFailure]]:
        """What rows with a grammar may take now, after what was read of the last step; and who cannot go on."""
        places = {row.request_id: place for place, row in enumerate(self._rows) if row is not None}
        return self._guides.advance(rows, places)

    def launch(self, logits: mx.array, mask: TokenMask | None = None) -> Launched:
        """The second half. Returns without waiting: the step's tokens feed the next one on the device."""
        shaped = self._penalties.apply(logits)
        if mask is None:
            tokens = self._sampler(shaped, self._positions)
        else:
            shaped = mask.apply(shaped)
            tokens = mask.replace_forbidden(shaped, self._sampler(shaped, self._positions))
        self._penalties.count(tokens)
        reading = self._probe(logits, tokens) if self._probe else None
        self._inputs = tokens
        self._positions = self._positions + 1
        mx.async_eval(tokens, self._positions, *(reading.arrays if reading else ()))  # type: ignore[no-untyped-call]
        return Launched(self._ids, tokens, reading)

    def _settle(self) -> None:
        """What depends on who is here, built once per change and not per step."""
        if self._shift is not None:
            shifts = [0 if row is None else self._shift(row) for row in self._rows]
            self._shifts = {"rope_deltas": mx.array(shifts, dtype=mx.int32)} if any(shifts) else {}
        self._ids = tuple(None if row is None else row.request_id for row in self._rows)
        self.ids = {row.request_id for row in self._rows if row is not None}
        self._sampler = Sampler([VACANT if row is None else row.sampling for row in self._rows], kernel=self._kernel)
        self._probe = RowLogprobs([None if row is None else row.logprobs for row in self._rows])
