"""Which rows of a step speculate and how far, and what became of it. See `depth.py` for whether it pays."""

from __future__ import annotations

from collections.abc import Callable, Collection

from millstream.engine.generation.plan import Plan, StepResult
from millstream.engine.generation.request import Request
from millstream.engine.generation.speculation.choice import Outcome
from millstream.engine.generation.speculation.depth import PLAIN, Choice, SpeculationDepth
from millstream.engine.messages import Speculated

Drafts = tuple[tuple[int, int], ...]
"""See `Plan.drafts`."""


class StepDrafts:
    """Pure. `depth`: None if the model has no drafters."""

    def __init__(self, depth: SpeculationDepth | None) -> None:
        self._depth = depth
        self._quiet = False
        """True if the last step only decoded, so that its work does not show in the time of the next."""
        self.verified = False
        """True if the last step verified drafts: then no row has computed its last token."""

    def choose(
        self, running: Collection[Request], *, changes: bool, fits: Callable[[int], bool]
    ) -> tuple[Drafts, Choice]:
        """`changes`: if rows join in this step: they get their slots first. `fits`: whether all rows may grow by so
        many tokens."""
        if self._depth is None or changes or self._depth.stands_plain:
            return (), PLAIN
        rows = [each for each in running if each.left > 1 and each.submit.speculate]
        drafters = {each.request_id: self._depth.drafters_of(each.submit) for each in rows}
        choice = self._depth.choose(drafters, len(running))
        if not choice.depth or not fits(choice.depth):
            return (), choice
        return tuple((each.request_id, min(each.left - 1, choice.depth)) for each in rows), choice

    def observe(self, plan: Plan, result: StepResult, seconds: float, *, changes: bool) -> None:
        """Tell what became of drafts; and what the pass took, if nothing else ran beside it. `changes`: if rows joined
        in that step."""
        other_work = plan.prefill or plan.encode or plan.save or plan.restore or plan.drop or result.prefilling
        quiet = not other_work and not changes
        alone, self._quiet = quiet and self._quiet, quiet
        self.verified = result.length > 1
        if self._depth is None:
            return
        drafted = [row for row in result.rows if row.proposed]
        took: float | None = None
        if self.verified:
            took = result.pass_seconds
        elif not result.waited and len(result.rows) == len(plan.decode):  # else it waited for less, or for more
            took = seconds
        given = sum(len(row.tokens) for row in result.rows)
        self._depth.observe(
            [Outcome(row.request_id, row.source, row.proposed, row.accepted) for row in drafted],
            guessed=result.guessed,
            length=result.length,
            rows=len(plan.decode),
            tokens=1 + sum(row.accepted for row in drafted) / max(1, len(plan.decode)),
            seconds=took if alone and took else None,
            wall=(given / len(plan.decode), seconds) if alone and seconds and plan.decode else None,
            waited=result.waited,
            asking=result.asking_seconds,
        )

    def failed(self) -> None:
        """A step raised: nothing is known of it."""
        self._quiet = self.verified = False

    def forget(self, request_id: int) -> None:
        if self._depth is not None:
            self._depth.forget(request_id)

    @property
    def speculated(self) -> Speculated | None:
        return None if self._depth is None else self._depth.speculated
