"""Which requests fit the KV budget now. Most steps check nothing: it is remembered for how many tokens all rows fit."""

from __future__ import annotations

from collections.abc import Collection

from millstream.engine.generation.kv_budget import AHEAD, HORIZON, PROMPT_PER_STEP, SURE_TOKENS, KvBudget
from millstream.engine.generation.kv_capacity import KEPT_TOKENS
from millstream.engine.generation.request import Request


class KvRoom:
    """Pure. `holding`: the requests that have a row or are in prefill."""

    def __init__(self, budget: KvBudget) -> None:
        self._budget = budget
        self._sure_tokens = 0
        """By how many tokens each row may grow without a check of the budget."""
        self._full = False
        """True if the oldest waiting request did not fit, and no row has joined or left since: rows only grow."""
        self.tight = False
        """Whether what rows leave must be freed: see `Plan.tight`."""

    def freed(self) -> None:
        """A row has gone, or another request is the oldest one that waits."""
        self._full = False

    def joined(self) -> None:
        """Prompts have become rows."""
        self._sure_tokens, self._full = 0, False

    def surplus(self, holding: Collection[Request]) -> list[Request]:
        """The youngest requests, to be preempted so that the next step fits. The oldest stays, whatever it needs."""
        if not self._budget.bounded:
            return []
        if self._sure_tokens:
            self._sure_tokens -= 1
            return []
        requests = sorted(holding, key=lambda request: request.age)
        rows = [request.kv_row for request in requests]
        longest = max((row.tokens for row in rows), default=0) + max(SURE_TOKENS)
        self.tight = not self._budget.has_plenty(len(rows), longest, KEPT_TOKENS)
        if not self.tight or self._budget.has_plenty(len(rows), longest):
            self._sure_tokens = max(SURE_TOKENS)
            return []
        self._sure_tokens = self._budget.sure_tokens(rows)
        surplus = []
        while not self._sure_tokens and len(rows) > 1 and not self._budget.fits(rows):
            rows.pop()
            surplus.append(requests.pop())
        return surplus

    def takes(self, request: Request, holding: Collection[Request]) -> bool:
        """Whether the oldest waiting request may have a row."""
        if self._full or not self._budget.bounded:
            return not self._full
        prompt = len(request.submit.prompt)
        longest = max((each.held_tokens for each in holding), default=0)
        ahead = HORIZON + prompt // PROMPT_PER_STEP
        count, longest = len(holding) + 1, max(longest, prompt) + ahead
        self.tight = self.tight or not self._budget.has_plenty(count, longest, KEPT_TOKENS)
        fits = not self.tight or self._budget.has_plenty(count, longest)
        fits = fits or self._budget.admits([each.kv_row for each in holding], prompt)
        self._full = not fits
        if fits:
            self._sure_tokens = 0
        return fits

    def takes_drafts(self, depth: int, holding: Collection[Request]) -> bool:
        """Whether every row may grow by a draft, and by the step before that is read for it: none is preempted for
        drafts."""
        if not self._budget.bounded:
            return True
        if self._sure_tokens > depth:
            self._sure_tokens -= depth + 1
            return True
        self._sure_tokens = 0
        return self._budget.fits([request.kv_row for request in holding], AHEAD + depth + 1)
