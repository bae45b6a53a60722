"""Verifying drafts: one forward pass of several tokens per row, in which the target chooses at every position.

A draft is accepted as long as it is what the target chose, and the target's choice is a function of (seed,
position): so a row gets the tokens that plain steps would have given it, only sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from millstream.backend.generation.sampling.guides import TokenMask
from millstream.backend.generation.sampling.logprobs import PendingLogprobs, RowLogprobs
from millstream.backend.generation.sampling.minimum import MinimumLengths
from millstream.backend.generation.sampling.penalties import Penalties
from millstream.backend.generation.sampling.sampler import Sampler
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import RowFailure, RowOutput
from millstream.engine.generation.speculation.lengths import pass_length
from millstream.types import Sampling

VACANT = Sampling()
"""The sampling of a vacant slot: greedy, which costs least. Its token is dropped."""

Commit = Callable[[Sequence[Sequence[int]], Sequence[RowOutput]], list[RowFailure]]
"""Given the tokens that each row of the pass has gained, and the rows of requests among them."""


class DraftedTokens:
    """The tokens of a pass: column 0 is each row's next input, then its draft, then padding."""

    def __init__(self, drafts: Mapping[int, Sequence[int]], indices: Mapping[int, int], rows: int) -> None:
        """`drafts`, `indices` by request id; `rows` of the pass, vacant ones included."""
        self.length = pass_length(max(len(draft) for draft in drafts.values()))
        self.of_row: list[tuple[int, ...]] = [()] * rows
        for request_id, draft in drafts.items():
            self.of_row[indices[request_id]] = tuple(draft)
        width = self.length - 1
        self.padded = [[*draft, *[0] * (width - len(draft))] for draft in self.of_row]
        """All as long as the longest may be."""

    def accepted(self, row: int, chosen: Sequence[int]) -> int:
        """How many tokens of a row's draft the target chose as well."""
        draft = self.of_row[row]
        return next((count for count, token in enumerate(draft) if chosen[count] != token), len(draft))


class PassSampling:
    """Sampling for passes of one length: the rows of the batch, each repeated for every position. Built once for each
    length after rows have changed; has no state of its own."""

    def __init__(self, rows: Sequence[Generate | None], length: int, vocab_size: int, *, kernel: bool) -> None:
        repeated = [row for row in rows for _ in range(length)]
        self._sampler = Sampler([VACANT if row is None else row.sampling for row in repeated], kernel=kernel)
        self._minimum = MinimumLengths(repeated, vocab_size)
        self._probe = RowLogprobs([None if row is None else row.logprobs for row in repeated])
        self._steps = mx.arange(length, dtype=mx.int32)

    def __call__(
        self,
        logits: mx.array,
        drafts: mx.array,
        positions: mx.array,
        penalties: Penalties,
        mask: TokenMask | None,
    ) -> tuple[mx.array, PendingLogprobs | None]:
        """`logits` (rows, length, vocabulary), `positions` (rows,) of the first token. Returns the tokens, (rows *
        length,), each as a plain step would draw it after the drafts before it."""
        every = (positions[:, None] + self._steps).reshape(-1)
        flat = logits.reshape(-1, logits.shape[-1])
        penalised = penalties.apply_to_drafts(logits, drafts).reshape(flat.shape)
        penalised = self._minimum(penalised, every)
        if mask is None:
            tokens, _ = self._sampler.step(penalised, every)
        else:
            masked = mask.apply(penalised)
            drawn, _ = self._sampler.step(masked, every)
            tokens = mask.replace_forbidden(masked, drawn)
        return tokens, self._probe(flat, tokens) if self._probe else None


class Verification:
    """A pass that the device is computing. Until it is read, the batch must not begin another one."""

    def __init__(
        self,
        ids: tuple[int | None, ...],
        drafted: DraftedTokens,
        tokens: mx.array,
        logprobs: PendingLogprobs | None,
        commit: Commit,
    ) -> None:
        self._ids = ids
        self._drafted = drafted
        self._tokens = tokens
        self._logprobs = logprobs
        self._commit = commit

    @property
    def length(self) -> int:
        """Tokens per row of the pass."""
        return self._drafted.length

    def read(self) -> tuple[list[RowOutput], list[RowFailure]]:
        """Wait for the pass and commit what each row has gained. Also returns the rows that cannot continue."""
        length = self._drafted.length
        flat: list[int] = self._tokens.tolist()  # type: ignore[assignment]
        logprobs = {} if self._logprobs is None else self._logprobs.read(flat)
        gained: list[list[int]] = []
        rows: list[RowOutput] = []
        for row, request_id in enumerate(self._ids):
            first = row * length
            accepted = self._drafted.accepted(row, flat[first : first + length])
            gained.append(flat[first : first + accepted + 1])
            if request_id is not None:
                known = tuple(logprobs[first + place] for place in range(accepted + 1) if first in logprobs)
                proposed = len(self._drafted.of_row[row])
                rows.append(RowOutput(request_id, tuple(gained[-1]), known, proposed, accepted))
        return rows, self._commit(gained, rows)


def joined(before: RowOutput | None, verified: RowOutput, source: str) -> RowOutput:
    """What a row gained in a plain step and in the pass after it, as one."""
    tokens, logprobs = (before.tokens, before.logprobs) if before is not None else ((), ())
    return replace(
        verified,
        tokens=(*tokens, *verified.tokens),
        logprobs=(*logprobs, *verified.logprobs),
        source=source if verified.proposed else "",
    )
