"""Drafts from a row's own context: what followed the last time that its latest tokens stood there."""

from __future__ import annotations

from millstream.backend.generation.drafters.lookup import LookupDrafter
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.speculation.prompt_lookup import PromptLookup

SURE = 8
"""A match of so many tokens is rarely wrong: it goes before a draft model, which costs more."""


class PromptLookupDrafter(LookupDrafter):
    name = "prompt-lookup"

    def join(self, submit: Generate) -> None:
        self._lookups[submit.request_id] = PromptLookup(submit.prompt)
