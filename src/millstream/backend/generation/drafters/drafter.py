"""What a drafter is. A wrong draft costs time and nothing else: the target's own choice decides every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from millstream.engine.generation.messages import Generate


class Drafter(Protocol):
    """Owner only. Follows the rows of a batch and guesses how they go on."""

    name: str
    cheap: bool
    """True if a proposal runs no forward pass and may be made in vain: then drafts are also compared with what plain
    steps give, which tells whether verifying them would pay."""

    def join(self, submit: Generate) -> None:
        """A row joins the batch. What it has generated already, before it was preempted, is in `submit.output`."""
        ...

    def drop(self, ids: set[int]) -> None:
        """Rows leave. Ids that it does not know are ignored."""
        ...

    def commit(self, request_id: int, tokens: Sequence[int]) -> None:
        """Tokens that a row has gained, in order. Rows that it does not know are ignored."""
        ...

    def propose(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """Drafts for some rows, of at most so many tokens. A row without a draft is absent."""
        ...
