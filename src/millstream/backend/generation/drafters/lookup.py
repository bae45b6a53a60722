"""What drafters share that look the answers of rows up in texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream.engine.generation.speculation.prompt_lookup import TextLookup


class LookupDrafter:
    """`least`: how many tokens must match. A text is indexed when the first draft from it is wanted, so that rows cost
    nothing while nobody speculates."""

    cheap = True

    def __init__(self, least: int = 1) -> None:
        self._least = least
        self._lookups: dict[int, TextLookup] = {}

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

    def agreed(self, request_id: int) -> int:
        """How many tokens of a row, before its latest draft, agree with the text."""
        return self._lookups[request_id].agreed
