"""Drafts from a row's own context: what followed the last time that its latest tokens stood there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream.engine.generation.messages import Generate
from millstream.engine.generation.speculation.prompt_lookup import PromptLookup

SURE = 8
"""A match of so many tokens is rarely wrong: it goes before a draft model, which costs more."""


class PromptLookupDrafter:
    """`least`: how many tokens must match. A row's context is indexed when its first draft is wanted, so that rows
    cost nothing while nobody speculates."""

    name = "prompt-lookup"
    cheap = True

    def __init__(self, least: int = 1) -> None:
        self._least = least
        self._lookups: dict[int, PromptLookup] = {}

    def join(self, submit: Generate) -> None:
        self._lookups[submit.request_id] = PromptLookup(submit.prompt)

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
            if lookup is not None and (draft := lookup.draft(most)) and lookup.agreed >= self._least:
                found[row] = draft
        return found
