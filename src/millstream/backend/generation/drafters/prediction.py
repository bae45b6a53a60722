"""Drafts from the text that a client expects: OpenAI's `prediction`, for files that are edited."""

from __future__ import annotations

from millstream.backend.generation.drafters.lookup import LookupDrafter
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.speculation.prompt_lookup import PredictionLookup


class PredictionDrafter(LookupDrafter):
    """Follows the prediction of each row that has one, from change to change."""

    name = "prediction"

    def join(self, submit: Generate) -> None:
        if submit.prediction:
            self._lookups[submit.request_id] = PredictionLookup(submit.prediction, submit.output)
