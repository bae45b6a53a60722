"""Cuts prompts into the chunks of a step. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.plan import Prefill
from millstream.engine.generation.request import Request, State
from millstream.engine.prefix_cache.cache import PrefixCache
from millstream.engine.prefix_cache.index import Hit

Admit = Callable[[Request], Hit | None]
"""Gives a waiting request a row and returns its cached prefix; None if there is no room for it."""


class PrefillChunks:
    """Knows what is left of a prompt, what a chunk of it costs, and where it may end."""

    def __init__(
        self,
        sizer: ChunkSizer,
        prefix_cache: PrefixCache,
        *,
        prefill_tokens: int,
        whole_media: bool = False,
        depth_cost: float = 0.0,
        scoring_cost: float = 1.0,
    ) -> None:
        """`prefill_tokens`: of a step, at most. `whole_media`: no chunk may end inside an image. `depth_cost`: by how
        much a token costs more for each token before it, relative to the first. `scoring_cost`: what a token costs a
        draft model that scores a prompt."""
        self._sizer = sizer
        self._cache = prefix_cache
        self._prefill_tokens = prefill_tokens
        self._whole_media = whole_media
        self._scoring_cost = scoring_cost
        self.depth_cost = depth_cost

    @property
    def at_once(self) -> int:
        """How many tokens a step beside rows may prefill if it completes them."""
        limit = self._sizer.at_once
        return self._prefill_tokens if limit is None else min(self._prefill_tokens, limit)

    def left(self, request: Request) -> int:
        """Tokens to prefill. For a waiting request, those that were not cached when it was first looked at."""
        if request.state is not State.WAITING:
            return request.work
        if request.prefix.expected is None:
            request.prefix.expected = self._cache.peek(request.prefix)
        return request.work_after(request.prefix.expected)

    def cost(self, start: int, end: int) -> float:
        """What these tokens of a prompt cost, in tokens of the beginning of one: attention reads all before them."""
        return (end - start) * (1 + self.depth_cost * (start + end) / 2)

    def chunk_cost(self, chunk: Prefill) -> float:
        """The same of a chunk. Of a prompt that is read in part, as much is missing before it as in it."""
        if chunk.spans:
            share = chunk.tokens / (chunk.end - chunk.start)
            return chunk.tokens * (1 + self.depth_cost * share * (chunk.start + chunk.end) / 2)
        cost = self.cost(chunk.start, chunk.end)
        return self._scoring_cost * cost if chunk.scores else cost

    def price(self, chunk: Prefill) -> int:
        """What a chunk takes of a budget, in tokens."""
        return math.ceil(self._scoring_cost * chunk.tokens) if chunk.scores else chunk.tokens

    def fill(
        self, queue: Iterable[Request], admit: Admit, budget: int, *, beside_rows: bool = False
    ) -> Iterator[Prefill]:
        """Spend the budget in order. A request gets a row only together with its first chunk."""
        first = True
        for request in queue:
            if budget <= 0 or (beside_rows and not first and self.left(request) > budget < self._sizer.least):
                return
            hit: Hit | None = None
            if request.state is State.WAITING:
                if (hit := admit(request)) is None:
                    return
                request.prefilled = hit.tokens
            if request.sparse is not None:
                if (chunk := self._sparse_chunk(request, budget)) is not None:
                    yield chunk
                    budget -= self.price(chunk)
                    if not chunk.joins:
                        return
                continue
            length = self._length(request, budget, beside_rows=beside_rows, first=first)
            for chunk in self._cut(request, length, hit):
                yield chunk
                # A one-token prompt has nothing to prefill, and its row still costs something in this step.
                budget -= max(1, chunk.end - chunk.start)
            if request.prefilled + length < request.prefill_end and not request.submit.media:
                return  # what is left of a budget is too little for a usual length
            first = False

    def _length(self, request: Request, budget: int, *, beside_rows: bool, first: bool) -> int:
        """All that is left of a prompt or what the budget allows; if that is cut beside rows, a usual length."""
        left = request.prefill_end - request.prefilled
        if beside_rows and request.submit.prompt_logprobs is not None:
            budget = min(budget, self._sizer.at_most(self.at_once))  # its chunks are computed at once
        if left <= budget or first or not beside_rows:
            return min(left, budget)
        return min(left, self._sizer.at_most(budget))

    def _sparse_chunk(self, request: Request, budget: int) -> Prefill | None:
        """The next chunk of a prompt that is read in part: the draft model reads it, then the target. None while the
        backend chooses."""
        sparse, submit, end = request.sparse, request.submit, request.prefill_end
        assert sparse is not None
        if sparse.kept is None:
            scoring = sparse.next_scoring(budget, end)
            return None if scoring is None else Prefill(submit, *scoring, scores=True)
        spans = sparse.next_reading(request.prefilled, budget, end)
        start, hit = request.prefilled, request.prefix.hit
        chunk = Prefill(submit, start, spans[-1][1] if spans else end, spans=spans)
        if hit.tokens and start == hit.tokens:
            chunk = replace(chunk, reuse=hit.handles, reuse_checkpoint=hit.checkpoint)
        return chunk

    def _cut(self, request: Request, length: int, hit: Hit | None) -> Iterator[Prefill]:
        """The next `length` tokens of a prompt, cut where checkpoints are saved. Of a prompt with media, one chunk at
        most, which ends before those that are not encoded."""
        start, stop = request.prefilled, request.prefilled + length
        while True:
            end = next((position for position in request.prefix.checkpoints if start < position < stop), stop)
            if request.submit.media:
                end = stop = request.chunk_end(end, whole_media=self._whole_media)
            chunk = Prefill(request.submit, start, end)
            if hit is not None and hit.tokens and start == hit.tokens:
                chunk = replace(chunk, reuse=hit.handles, reuse_checkpoint=hit.checkpoint)
            if end > start or chunk.joins or hit is not None:
                yield chunk
            if end >= stop:
                return
            start = end
