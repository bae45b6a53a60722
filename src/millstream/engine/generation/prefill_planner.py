"""Decides which prompts a step prefills, and how much of each. Pure: it is told how long steps took.

Prompts are read oldest first, to the end, so the first ones answer early. While rows decode, chunks are gentle as long
as every prompt will be complete within a patience that way; otherwise they grow, up to the longest gap that running
streams may have. Short prompts may overtake long ones, by a bounded amount.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.plan import EncodeMedia, Plan, Prefill, StepResult
from millstream.engine.generation.prefill_chunks import Admit, PrefillChunks
from millstream.engine.generation.request import Request, State
from millstream.engine.generation.short_prompts import FEW, ShortPrompts
from millstream.engine.prefix_cache.cache import PrefixCache

PATIENCE = 16
"""How long a prompt may wait for its prefill before chunks grow, in longest gaps: 0.8 s for gaps of 50 ms."""

OVERTAKING = 1 / 3
"""Tokens of short prompts that may overtake, per token of the others: a quarter of all."""

RECEIVED_TOKEN = 1e-7
"""Seconds that the host takes to receive a token of a prompt, about. It is Python's, and the same beside any device."""

RECEIVED_SHARE = 0.25
"""What it may take of a decode step that also begins the prompt."""


@dataclass(frozen=True, slots=True)
class PlannedPrefill:
    """What a step prefills and encodes. `complete`: it must compute all of that, though rows decode;
    else in how many steps after it (`parts`)."""

    chunks: Sequence[Prefill] = ()
    encode: tuple[EncodeMedia, ...] = ()
    complete: bool = False
    parts: int | None = None


NOTHING = PlannedPrefill()


class PrefillPlanner:
    """If no row decodes, a step prefills `prefill_tokens`. Beside rows, it prefills as many tokens of whole short
    prompts if the gap allows it, or as much of the oldest prompts as `sizer` allows."""

    def __init__(
        self,
        sizer: ChunkSizer,
        *,
        prefill_tokens: int,
        prefix_cache: PrefixCache,
        whole_media: bool = False,
        depth_cost: float = 0.0,
        scoring_cost: float = 1.0,
    ) -> None:
        """`whole_media`, `depth_cost`, `scoring_cost`: see `PrefillChunks`."""
        self._chunks = PrefillChunks(
            sizer,
            prefix_cache,
            prefill_tokens=prefill_tokens,
            whole_media=whole_media,
            depth_cost=depth_cost,
            scoring_cost=scoring_cost,
        )
        self._sizer = sizer
        self._prefill_tokens = prefill_tokens
        self._patience = PATIENCE * sizer.max_gap
        self._credit = float(sizer.most)
        """Tokens of short prompts that may overtake."""
        self._chunk_pending = False
        """True while the backend computes a chunk over several steps."""
        self._received: int | None = None
        """The last long prompt that waited for a step because it had just arrived."""
        self.clock = 0.0
        """Seconds of all steps. A request's patience counts from the clock at its arrival."""

    def plan(
        self,
        prefilling: Sequence[Request],
        waiting: Iterable[Request],
        admit: Admit,
        *,
        rows: int,
        joining: bool = False,
    ) -> PlannedPrefill:
        """The prefill of the next step. `waiting`: requests that may get a row, oldest first; `admit` adds them to
        `prefilling`. `rows`: how many decode in this step. `joining`: some of them for the first time."""
        self._sizer.rows = max(1, rows)
        waiting = list(waiting)
        oldest = next(iter((*_unfinished(prefilling), *waiting)), None)
        self._sizer.waited = 0.0 if oldest is None else self.clock - oldest.arrived
        if not rows:
            return PlannedPrefill(self._chunks_alone(prefilling, waiting, admit), self._encode(prefilling, alone=True))
        if self._chunk_pending or not (prefilling or waiting):
            return NOTHING
        chunks, complete, parts = self._chunks_beside_rows(prefilling, waiting, admit, joining)
        encode = self._encode(prefilling, alone=False) if complete or not chunks else ()
        if complete or encode or not chunks:
            return PlannedPrefill(chunks, encode, complete or bool(encode))
        if parts is None:
            cost = sum(self._chunks.cost(chunk.start, chunk.end) for chunk in chunks)
            most = self._sizer.gentle_chunk(1 + self._chunks.depth_cost * chunks[0].start)
            gentle = sum(chunk.end - chunk.start for chunk in chunks) <= most
            parts = self._sizer.parts(cost, gentle=gentle, short=all(chunk.joins for chunk in chunks))
        return PlannedPrefill(chunks, parts=parts)

    def _chunks_alone(self, prefilling: Iterable[Request], waiting: Iterable[Request], admit: Admit) -> list[Prefill]:
        queue = [*_unfinished(prefilling), *waiting]
        overtaking = self._overtaking(queue, self._prefill_tokens)
        others = [request for request in queue if request not in overtaking]
        chunks = [*self._chunks.fill(overtaking, admit, self._prefill_tokens)]
        spent = sum(max(1, self._chunks.price(chunk)) for chunk in chunks)
        chunks += self._chunks.fill(others, admit, self._prefill_tokens - spent)
        self._book(chunks, overtaking)
        return chunks

    def _chunks_beside_rows(
        self, prefilling: Iterable[Request], waiting: Iterable[Request], admit: Admit, joining: bool
    ) -> tuple[list[Prefill], bool, int | None]:
        """Chunks, whether the step must complete them, or else in how many steps they should be computed."""
        started = _unfinished(prefilling)
        queue = [*started, *waiting]
        if any(request.submit.media and request.next_media is not None for request in (*started, *queue[:1])):
            # Encoding takes its part of the step as well.
            chunks = [*self._chunks.fill(queue, admit, self._beside_media, beside_rows=True)]
            self._book(chunks)
            return chunks, True, None
        pace = self._needed_pace(queue)
        if (passes := self._sizer.short_prompts) is None:
            return *self._unmeasured(queue, pace, admit), None
        overtaking = self._overtaking(queue, passes.tokens(self._sizer.rows))
        short = overtaking or list(takewhile(self._is_short, queue))
        lengths = [self._chunks.left(request) for request in short]
        if short and not overtaking and self._gathers(passes, short):
            return [], False, None
        chosen = passes.choose(lengths, self._sizer.rows, pace)
        if joining and (chosen.parts or not chosen.count):
            return [], False, None  # what joins costs the host as much as building a pass: not in one step
        if not chosen.count:
            return self._oldest(queue, pace, admit), False, None
        sharing = short[: chosen.count]
        chunks = [*self._chunks.fill(sharing, admit, sum(max(1, length) for length in lengths[: chosen.count]))]
        self._book(chunks, overtaking)
        return chunks, not chosen.parts, chosen.parts or None

    def _oldest(self, queue: Sequence[Request], pace: float, admit: Admit) -> list[Prefill]:
        """A chunk of the oldest prompts, as long as that pace needs and the gap allows. None in the step in which the
        first of them arrives, if steps are so short that receiving its tokens shows in them: to begin it takes the host
        as long again."""
        if queue and self._has_just_arrived(queue[0]):
            self._received = queue[0].request_id
            return []
        weight = 1 + self._chunks.depth_cost * (queue[0].prefilled if queue else 0)
        chunk = self._sizer.chunk_for(pace, weight, self._chunks.depth_cost)
        chunks = [*self._chunks.fill(queue, admit, chunk, beside_rows=True)]
        self._book(chunks)
        return chunks

    def _has_just_arrived(self, request: Request) -> bool:
        if request.state is not State.WAITING or request.request_id == self._received:
            return False
        decode = self._sizer.decode(self._sizer.rows)
        takes_long = decode is not None and len(request.submit.prompt) * RECEIVED_TOKEN > RECEIVED_SHARE * decode
        return takes_long and request.arrived == self.clock and self._chunks.left(request) > self._sizer.most

    def _unmeasured(self, queue: Sequence[Request], pace: float, admit: Admit) -> tuple[list[Prefill], bool]:
        """Chunks, and whether the step must complete them: where costs are not known well, or steps are long."""
        short = list(takewhile(self._is_short, queue))
        complete = self._sizer.is_slow or len(short) >= self._sizer.rows
        if not complete and self._should_gather(short):
            return [], False
        budget = self._chunks.at_once if complete else min(self._prefill_tokens, self._sizer.in_parts(pace))
        overtaking = self._overtaking(queue, budget)
        short = overtaking or _fitting(short, self._chunks.left, budget)
        if short and self._chunks.left(short[0]) > budget:
            # Where 100 tokens take longer than the gap, prompts that are cut would leave the batch of a busy server
            # half empty. So one that has lost its patience is not.
            late = short[0].arrived + self._patience < self.clock
            budget = self._chunks.left(short[0]) if late else self._sizer.at_most(budget)
            complete = complete or late
        chunks = [*self._chunks.fill(short, admit, budget, beside_rows=True)]
        if not chunks:
            return self._oldest(queue, pace, admit), False
        self._book(chunks, overtaking)
        return chunks, complete

    def _gathers(self, passes: ShortPrompts, short: Sequence[Request]) -> bool:
        """Whether these prompts, the oldest ones, should wait for others that share their pass."""
        if short[0].state is not State.WAITING:
            return False
        waited, since_last = (self.clock - each.arrived for each in (short[0], short[-1]))
        return passes.gathers(len(short), self._sizer.rows, waited, since_last)

    def _should_gather(self, short: Sequence[Request]) -> bool:
        """Whether these prompts, the oldest ones, should wait for others that share their pass. A pass has a fixed cost
        that all rows pay: while many streams start, passes are as large as what runs already, so there are few."""
        if not short or len(short) * FEW <= self._sizer.rows or short[0].state is not State.WAITING:
            return False
        return self.clock < short[0].arrived + self._sizer.gathering

    def _encode(self, prefilling: Iterable[Request], *, alone: bool) -> tuple[EncodeMedia, ...]:
        """Media of the oldest request that waits for them: one request per step, and for as long as a chunk takes if
        rows are decoding."""
        for request in prefilling:
            if request.submit.media and (first := request.next_media) is not None:
                return (EncodeMedia(request.submit, first, self._prefill_tokens if alone else self._beside_media),)
        return ()

    def observe(self, plan: Plan, result: StepResult, seconds: float) -> None:
        """The step of this plan took so long."""
        self.clock += seconds
        self._chunk_pending = result.prefilling
        tokens = sum(self._chunks.chunk_cost(chunk) for chunk in plan.prefill)
        if plan.encode or result.length > 1:
            self._sizer.skip_steps()
        self._observe_pass(plan, result, seconds)
        self._sizer.observe(rows=len(plan.decode), prompt_tokens=tokens, seconds=seconds, prefilling=result.prefilling)

    def _observe_pass(self, plan: Plan, result: StepResult, seconds: float) -> None:
        """Of short prompts that shared one beside rows."""
        passes, rows = self._sizer.passes, len(plan.decode)
        whole = all(chunk.joins and not chunk.spans for chunk in plan.prefill)
        if not rows or not whole or plan.encode or result.length > 1 or (decode := self._sizer.decode(rows)) is None:
            passes.forget()
            return
        tokens = sum(max(1, chunk.tokens) for chunk in plan.prefill)
        passes.observe(tokens=tokens, seconds=seconds, decode=decode, prefilling=result.prefilling)

    def reset(self) -> None:
        """A step has failed: the backend has dropped all prompts."""
        self._chunk_pending = False
        self._sizer.passes.forget()

    @property
    def _beside_media(self) -> int:
        """How many tokens a step beside rows may prefill if it encodes media for as long."""
        limit = self._sizer.at_once
        return self._sizer.chunk if limit is None else max(self._sizer.chunk, self._sizer.at_most(limit / 2))

    def _is_short(self, request: Request) -> bool:
        """True if one chunk will do, even a gentle one, or a pass of a step that keeps the longest gap. The end of a
        long prompt is not short: it may span steps. A prompt that is read in part is long."""
        if request.sparse is not None:
            return False
        started = request.state is State.PREFILLING and request.prefilled > request.prefix.hit.tokens
        passes = self._sizer.short_prompts
        most = self._sizer.most if passes is None else max(self._sizer.most, min(self._prefill_tokens, passes.longest))
        return not started and self._chunks.left(request) <= most

    def _overtaking(self, queue: Sequence[Request], budget: int) -> list[Request]:
        """Short prompts that go before the oldest one, which is long and has started: one that waits for memory or for
        a row is not overtaken, or it might wait for ever."""
        if not queue or self._is_short(queue[0]) or queue[0].state is State.WAITING:
            return []
        limit = min(budget, int(self._credit))
        chosen = _fitting([request for request in queue if self._is_short(request)], self._chunks.left, limit)
        return chosen if chosen and self._chunks.left(chosen[0]) <= limit else []

    def _needed_pace(self, queue: Iterable[Request]) -> float:
        """Tokens per second that complete every prompt within the patience, as far as it is not over."""
        tokens, pace = 0.0, 0.0
        for request in queue:
            tokens += self._chunks.cost(request.prefill_end - self._chunks.left(request), request.prefill_end)
            seconds = request.arrived + self._patience - self.clock
            pace = max(pace, tokens / max(seconds, self._sizer.max_gap))
        return pace

    def _book(self, chunks: Iterable[Prefill], overtaking: Iterable[Request] = ()) -> None:
        """Those that overtake spend credit, all others earn it."""
        overtakers = {request.request_id for request in overtaking}
        for chunk in chunks:
            tokens = self._chunks.price(chunk)
            self._credit += -tokens if chunk.request.request_id in overtakers else tokens * OVERTAKING
        self._credit = min(self._credit, max(self._prefill_tokens, self._sizer.most))


def _unfinished(prefilling: Iterable[Request]) -> list[Request]:
    return [request for request in prefilling if request.state is State.PREFILLING]


def _fitting(requests: Sequence[Request], left: Callable[[Request], int], budget: int) -> list[Request]:
    """The first of these requests, and those after it that fit into the budget as a whole."""
    chosen: list[Request] = []
    for request in requests:
        if chosen and left(request) > budget:
            break
        chosen.append(request)
        budget -= max(1, left(request))
    return chosen
