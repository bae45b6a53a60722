"""Drafts from the text that a client expects: OpenAI's `prediction`, for files that are edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream.engine.generation.messages import Generate
from millstream.engine.generation.speculation.prompt_lookup import PredictionLookup


class PredictionDrafter:
    """Follows the prediction of each row that has one, from change to change."""

    name = "prediction"
    cheap = True

    def __init__(self) -> None:
        self._lookups: dict[int, PredictionLookup] = {}

    def join(self, submit: Generate) -> None:
        if submit.prediction:
            self._lookups[submit.request_id] = PredictionLookup(submit.prediction, submit.output)

    def drop(self, ids: set[int]) -> None:
        for each in ids:
            self._lookups.pop(each, None)

    def commit(self, request_id: int, tokens: Sequence[int]) -> None:
        if (lookup := self._lookups.get(request_id)) is not None:
            lookup.append(tokens)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        found = {}
        for row, most in wanted.items():
            lookup = self._lookups.get(row)
            if lookup is not None and (draft := lookup.draft(most)):
                found[row] = draft
        return found
