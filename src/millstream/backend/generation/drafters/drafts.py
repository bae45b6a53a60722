"""The drafters of a batch, in order of preference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream.backend.generation.drafters.drafter import Drafter
from millstream.backend.generation.drafters.lookup import LookupDrafter
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.speculation.sources import source_of


class Drafts:
    """Owner only. Each row gets its draft from the first drafter that has one."""

    def __init__(self, drafters: Sequence[Drafter] = ()) -> None:
        self.drafters = tuple(drafters)
        self._speculating: set[int] = set()
        self.sources: dict[int, str] = {}
        """Of the latest proposal, by request id: see `speculation/sources.py`."""

    def __bool__(self) -> bool:
        return bool(self.drafters)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(drafter.name for drafter in self.drafters))

    @property
    def always(self) -> bool:
        """True if one of them runs forward passes: it nearly always has a draft, and only a trial tells what it is
        worth."""
        return any(not drafter.cheap for drafter in self.drafters)

    def join(self, submit: Generate) -> None:
        """A row joins the batch. One that must not speculate is not followed."""
        if not submit.speculate:
            return
        self._speculating.add(submit.request_id)
        for drafter in self.drafters:
            drafter.join(submit)

    def drop(self, ids: set[int]) -> None:
        gone = ids & self._speculating
        self._speculating -= gone
        if gone:
            for drafter in self.drafters:
                drafter.drop(gone)

    def commit(self, request_id: int, tokens: Sequence[int]) -> None:
        """Tokens that a row has gained, in order."""
        if tokens and request_id in self._speculating:
            for drafter in self.drafters:
                drafter.commit(request_id, tokens)

    def propose(self, wanted: Mapping[int, int], *, cheap: bool = False) -> dict[int, tuple[int, ...]]:
        """Drafts of at most so many tokens. A row without one is absent. `cheap`: no forward pass is run for them."""
        missing = {row: most for row, most in wanted.items() if most > 0 and row in self._speculating}
        found: dict[int, tuple[int, ...]] = {}
        self.sources = {}
        for drafter in self.drafters:
            if not missing:
                break
            if cheap and not drafter.cheap:
                continue
            for row, draft in drafter.propose(missing).items():
                if row in missing and draft:
                    found[row] = tuple(draft[: missing.pop(row)])
                    self.sources[row] = _source(drafter, row)
        return found

    def clear(self) -> None:
        """Forget all rows: after a failed step."""
        self.drop(set(self._speculating))


def _source(drafter: Drafter, row: int) -> str:
    return source_of(drafter.name, drafter.agreed(row)) if isinstance(drafter, LookupDrafter) else drafter.name
