"""Drafts without a meaning, for the calibration: what a pass costs does not depend on whether they are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream.engine.generation.messages import Generate


class AnyTokens:
    """Has a draft for every row, as long as is wanted."""

    name = "any-tokens"
    cheap = True

    def join(self, submit: Generate) -> None:
        pass

    def drop(self, ids: set[int]) -> None:
        pass

    def commit(self, request_id: int, tokens: Sequence[int]) -> None:
        pass

    def propose(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        return {row: (0,) * most for row, most in wanted.items()}
