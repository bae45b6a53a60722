"""The drafters of a backend: what rows have gained, which drafts are worth a pass, and which are only compared."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from millstream.backend.generation.drafters.drafts import Drafts
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import RowOutput
from millstream.engine.generation.speculation.choice import Odds, Outcome, best_length

GUESSED = 8
"""The most tokens of a draft that is compared with plain steps."""


class Guess:
    """A draft that no pass verifies: it is compared with the tokens that its row gains anyway."""

    __slots__ = ("right", "source", "tokens")

    def __init__(self, source: str, tokens: tuple[int, ...]) -> None:
        self.source = source
        self.tokens = tokens
        self.right = 0

    def compare(self, gained: Sequence[int]) -> tuple[int, int]:
        """How many of these tokens it said something about, and how many of those it said right."""
        before = self.right
        for token in gained:
            if self.right == len(self.tokens):
                break
            if self.tokens[self.right] != token:
                self.tokens = ()  # all is known of it
                return self.right - before + 1, self.right - before
            self.right += 1
        return self.right - before, self.right - before

    @property
    def over(self) -> bool:
        return self.right >= len(self.tokens)


class Speculating:
    """Owner only. Tells drafters what rows have gained when they are asked, not before: with hundreds of rows nobody
    drafts, and nothing is told."""

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts
        self._rows: dict[int, Generate] = {}
        self._untold: dict[int, list[int]] = {}
        """Tokens of each row that drafters have not been told."""
        self._ended: set[int] = set()
        """Rows that gave a stop token: the scheduler ends them before the next step, unless it came too early."""
        self._seconds = 0.0
        """What comparing, and asking in vain, has taken since the last report."""
        self._guesses: dict[int, Guess] = {}
        self._compared: list[Outcome] = []

    @property
    def rows(self) -> int:
        """How many rows are followed."""
        return len(self._rows)

    def join(self, submits: Iterable[Generate]) -> None:
        for submit in submits:
            if submit.speculate:
                self._rows[submit.request_id] = submit
                self._untold[submit.request_id] = []
                self.drafts.join(submit)

    def drop(self, ids: Iterable[int]) -> None:
        gone = {request_id for request_id in ids if self._rows.pop(request_id, None) is not None}
        for request_id in gone:
            self._untold.pop(request_id, None)
            self._guesses.pop(request_id, None)
        self._ended -= gone
        self.drafts.drop(gone)

    def clear(self) -> None:
        """Forget all rows: after a failed step."""
        self.drop(list(self._rows))
        self._compared.clear()

    def gained(self, rows: Sequence[RowOutput]) -> None:
        """Rows have new tokens. Compares what was guessed of them."""
        untold = self._untold
        for row in rows:  # all rows in every step: as little as can be
            if (tokens := untold.get(row.request_id)) is not None:
                tokens += row.tokens
        if self._guesses:
            self._compare(rows)
        if self.drafts.always:
            self._tell(untold)

    def _compare(self, rows: Sequence[RowOutput]) -> None:
        began = time.perf_counter()
        for row in rows:
            if (guess := self._guesses.get(row.request_id)) is not None:
                self._compared.append(Outcome(row.request_id, guess.source, *guess.compare(row.tokens)))
                if guess.over:
                    del self._guesses[row.request_id]
        self._seconds += time.perf_counter() - began

    def guess(self, ids: Sequence[int]) -> None:
        """Begin to compare drafts of these rows with what plain steps give."""
        if not ids:
            return
        began = time.perf_counter()
        if asked := {row: GUESSED for row in ids if row in self._rows and row not in self._guesses}:
            self._tell(asked)
            for row, draft in self.drafts.propose(asked, cheap=True).items():
                self._guesses[row] = Guess(self.sources[row], draft)
        self._seconds += time.perf_counter() - began

    def take_seconds(self) -> float:
        """What comparing, and asking in vain, has taken since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def compared(self) -> tuple[Outcome, ...]:
        """What became of guesses since the last call."""
        compared, self._compared = tuple(self._compared), []
        return compared

    def expects_drafts(self, wanted: Mapping[int, int], odds: Odds | None, batch: int) -> bool:
        """Whether it is worth waiting for the step under way, to draft after it. Rows that have no drafts now will
        hardly have some a token later; if they have, the next step finds them."""
        if self.drafts.always:
            return True
        began = time.perf_counter()
        if self._propose(wanted, odds, batch, cheap=True):
            return True
        self._seconds += time.perf_counter() - began
        return False

    def propose(self, wanted: Mapping[int, int], odds: Odds | None, batch: int) -> dict[int, tuple[int, ...]]:
        """Drafts after all that was gained, if a pass that verifies them pays; `sources` tells whose they are.
        `wanted`: most tokens by request; `batch`: rows of the pass."""
        return self._propose(wanted, odds, batch, cheap=False)

    @property
    def sources(self) -> Mapping[int, str]:
        return self.drafts.sources

    def _propose(
        self, wanted: Mapping[int, int], odds: Odds | None, batch: int, *, cheap: bool
    ) -> dict[int, tuple[int, ...]]:
        self._tell(wanted)
        asked = {row: most for row, most in wanted.items() if row in self._rows and row not in self._ended}
        found = self.drafts.propose(asked, cheap=cheap) if asked else {}
        drafts = {row: self._up_to_stop(row, draft) for row, draft in found.items()}
        if not drafts or odds is None:
            return drafts
        length = best_length(odds, batch, {row: (self.sources[row], len(draft)) for row, draft in drafts.items()})
        return {row: draft[: length - 1] for row, draft in drafts.items()} if length > 1 else {}

    def _up_to_stop(self, row: int, draft: tuple[int, ...]) -> tuple[int, ...]:
        """A row ends with its stop token: what it computes after that would only be in the way of a checkpoint."""
        stops = self._rows[row].stop_tokens
        if stops.isdisjoint(draft):
            return draft
        return draft[: 1 + next(place for place, token in enumerate(draft) if token in stops)]

    def _tell(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            if not (tokens := self._untold.get(request_id)):
                continue
            self.drafts.commit(request_id, tuple(tokens))
            if not self._rows[request_id].stop_tokens.isdisjoint(tokens):
                self._ended.add(request_id)
            tokens.clear()
