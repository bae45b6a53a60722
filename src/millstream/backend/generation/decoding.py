"""The decode pass of each step: when it is launched and when it is read, plain or verifying drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from millstream.backend.generation.batch import Batch, Launched
from millstream.backend.generation.drafters.model_drafter import ModelDrafter
from millstream.backend.generation.speculating import Speculating
from millstream.backend.generation.verification import Verification, joined
from millstream.engine.generation.plan import Plan, RowFailure, RowOutput
from millstream.engine.generation.speculation.choice import Odds
from millstream.engine.generation.speculation.lengths import LENGTHS


@dataclass(slots=True)
class Decoding:
    """The decode pass of a step, as it is under way: plain, or verifying drafts."""

    launched: Launched | None = None
    verification: Verification | None = None
    rows: list[RowOutput] | None = None
    """Of the step before, if it had to be read for this one: a draft and a grammar need its tokens."""
    failed: list[RowFailure] = field(default_factory=list)
    """Rows that cannot follow their grammar."""
    sources: Mapping[int, str] = field(default_factory=dict)
    """Where each row's draft comes from."""
    started: float = 0.0
    """When drafting began."""

    @property
    def running(self) -> bool:
        return self.launched is not None or self.verification is not None

    @property
    def length(self) -> int:
        """Tokens per row."""
        return 1 if self.verification is None else self.verification.length

    @property
    def pass_seconds(self) -> float:
        """Of a pass that verified drafts, from the drafting on."""
        return 0.0 if self.verification is None else time.monotonic() - self.started


class Decoder:
    """Owner only. A plain pass is read when the next one is launched, so the device never waits for Python. One that
    verifies drafts reads the pass before, drafts, and is read in its own step."""

    def __init__(
        self,
        speculating: Speculating,
        widest_pass: Callable[[int], int | None] = lambda rows: None,
        model_drafter: ModelDrafter | None = None,
        *,
        queued: bool = True,
    ) -> None:
        """`widest_pass`: see `GenerationFacts`. `queued`: a step is given to the device before the last one is read;
        otherwise it is built before, and given to the device then."""
        self._queued = queued
        self._speculating = speculating
        self._widest_pass = widest_pass
        self._model_drafter = model_drafter
        self._pending: Launched | None = None

    def clear(self) -> None:
        """Forget the pass that is not read: after a failed step."""
        self._pending = None

    def launch(self, batch: Batch, plan: Plan, late: Collection[int]) -> Decoding:
        """Launch the pass of a step. `late`: rows that joined behind the pass of the step before."""
        if not batch.ids:
            return Decoding()
        # Late rows have no drafts: they have not decoded yet.
        wanted = {row: tokens for row, tokens in plan.drafts if row not in late}
        decoding = self._draft(batch, wanted, plan.odds) if plan.drafts else Decoding()
        if decoding.verification is not None:
            return decoding
        logits = batch.forward()
        if not batch.guided:
            decoding.launched = batch.launch(logits, later=not self._queued)
            if not self._queued:
                decoding.rows = self._read(batch) if decoding.rows is None else decoding.rows
                decoding.launched.start()
            return decoding
        if self._queued:
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        unread = decoding.rows is None
        rows = decoding.rows = self._read(batch) if decoding.rows is None else decoding.rows
        mask, failed = batch.guide(rows if unread else ())
        decoding.failed += failed
        decoding.launched = batch.launch(logits, mask)
        return decoding

    def _draft(self, batch: Batch, wanted: dict[int, int], odds: Odds | None) -> Decoding:
        """Verify drafts, if there are some that pay. Else a plain step is due; if it was not worth it to read the one
        before for the drafts, that goes on."""
        speculating, rows = self._speculating, len(batch.ids)
        wanted = self._exact(batch, wanted)
        if not batch.supports_length or not wanted:
            return Decoding()
        if self._pending is not None and not batch.guided and not speculating.expects_drafts(wanted, odds, rows):
            return Decoding()
        decoding = Decoding(rows=self._read(batch))
        assert decoding.rows is not None
        self._pending = None
        decoding.failed += batch.catch_up(decoding.rows)
        decoding.started = time.monotonic()
        drafts = speculating.propose(wanted, odds, rows)
        if self._model_drafter is not None:
            decoding.started += self._model_drafter.read_seconds
        if drafts:
            decoding.sources = dict(speculating.sources)
            decoding.verification, failed = batch.launch_drafts(drafts)
            decoding.failed += failed
        return decoding

    def _exact(self, batch: Batch, wanted: dict[int, int]) -> dict[int, int]:
        """Drafts so short that their pass gives the numbers of plain steps, which are as wide as they were for rows
        that have left. `wanted`: most tokens by request."""
        most = self._widest_pass(batch.size)
        if most is None:
            return wanted
        longest = max((length for length in LENGTHS if length * len(batch.ids) <= most), default=1)
        return {row: min(tokens, longest - 1) for row, tokens in wanted.items()} if longest > 1 else {}

    def finish(self, batch: Batch, decoding: Decoding) -> list[RowOutput]:
        """Wait for what a step reports: the plain step before it, and its own pass if that verifies drafts."""
        rows = self._read(batch) if decoding.rows is None else decoding.rows
        self._pending = decoding.launched
        if decoding.verification is None:
            return rows
        verified, failed = decoding.verification.read()
        self._speculating.gained(verified)
        decoding.failed += failed
        before = {row.request_id: row for row in rows}
        return [joined(before.get(row.request_id), row, decoding.sources.get(row.request_id, "")) for row in verified]

    def _read(self, batch: Batch) -> list[RowOutput]:
        """Wait for the last step; its tokens, for the rows that are still in the batch."""
        if self._pending is None:
            return []
        rows = self._pending.read(batch.ids)
        batch.read(rows)
        self._speculating.gained(rows)
        return rows
