"""Decides which requests run in the next step.

Pure: no thread, clock, MLX or I/O, so that every interleaving can be tested.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice

from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.kv_budget import KvBudget
from millstream.engine.generation.kv_room import KvRoom
from millstream.engine.generation.messages import (
    ClearPrefixCache,
    Generate,
    Generated,
    PromptLogprobs,
    StepTokens,
    Tokens,
)
from millstream.engine.generation.pass_planner import PassPlanner
from millstream.engine.generation.plan import Plan, Prefill, StepResult
from millstream.engine.generation.prefill_planner import PrefillPlanner
from millstream.engine.generation.request import Request, State
from millstream.engine.generation.sparse_prompt import SparsePrompt
from millstream.engine.generation.speculation.depth import SpeculationDepth
from millstream.engine.generation.speculation.step_drafts import StepDrafts
from millstream.engine.messages import Command, Event, Failed, Finished, Speculated, Started
from millstream.engine.prefix_cache.cache import NullPrefixCache, PrefixCache
from millstream.engine.prefix_cache.index import Hit
from millstream.engine.prefix_cache.orders import RestorePrefix
from millstream.model_facts import Calibration, SpecPrefillFacts
from millstream.types import FinishReason

COLUMNS_FROM = 4
"""Rows whose tokens are one event."""

SAVING_STEPS = 3
"""For so many steps a row waits until what is saved of its prompt is copied: others may be saved all the time."""


class GenerationScheduler:
    """Keeps requests in order, gives them rows, and turns a step's result into events.

    At most `max_rows` requests hold a row. A step prefills at most `prefill_tokens`; while rows decode, what
    `PrefillPlanner` allows, so that running streams keep their pace.

    Requests start in the order of their arrival, and the youngest are preempted if the rows outgrow the KV budget. The
    oldest never is, so every request ends.
    """

    commands = (Generate, ClearPrefixCache)

    def __init__(
        self,
        *,
        max_rows: int,
        prefill_tokens: int,
        chunk_sizer: ChunkSizer | None = None,
        kv_budget: KvBudget | None = None,
        prefix_cache: PrefixCache | None = None,
        whole_media: bool = False,
        depth_cost: float = 0.0,
        speculation: SpeculationDepth | None = None,
        spec_prefill: SpecPrefillFacts | None = None,
        shared_passes: Calibration | None = None,
    ) -> None:
        """`kv_budget`: None for no bound. `whole_media`: no chunk may end inside an image. `speculation`: None if the
        model has no drafters. `spec_prefill`: how prompts are read in part, if requests allow it.
        `shared_passes`: what they cost, where prompts share passes from any offset."""
        if max_rows < 1 or prefill_tokens < 1:
            raise ValueError("max_rows and prefill_tokens must be at least 1")
        self._max_rows = max_rows
        self._spec_prefill = spec_prefill
        self._room = KvRoom(kv_budget or KvBudget(None))
        self._ages = itertools.count()
        self._cache = prefix_cache or NullPrefixCache()
        planner = PrefillPlanner if shared_passes is None else partial(PassPlanner, shared_passes)
        self._planner = planner(
            chunk_sizer or ChunkSizer(most=prefill_tokens, least=prefill_tokens),
            prefill_tokens=prefill_tokens,
            prefix_cache=self._cache,
            whole_media=whole_media,
            depth_cost=depth_cost,
            scoring_cost=1.0 if spec_prefill is None else spec_prefill.cost,
        )
        self._requests: dict[int, Request] = {}
        """All that have not ended. Those in no queue below are held or fetching."""
        self._waiting: deque[Request] = deque()
        """In the order of their arrival."""
        self._prefilling: list[Request] = []
        """Those prefilling or completing."""
        self._running: dict[int, Request] = {}
        self._joined: list[Request] = []
        """Those that have joined the running ones since the last plan."""
        self._drop: list[int] = []
        self._restore: list[RestorePrefix] = []
        self._exporting = False
        self._started: list[Started] = []
        self._drafts = StepDrafts(speculation)
        self._changes = True
        """True if rows join in the step that was planned last."""

    @property
    def idle(self) -> bool:
        """True if there is nothing to plan: the owner may sleep until mail comes."""
        requests = self._waiting or self._prefilling or self._running
        return not (requests or self._drop or self._restore or self._exporting or self._cache.has_orders)

    def submit(self, submit: Generate, *, held: bool = False) -> None:
        """With `held`, the request stays outside the queue until `release` or `refuse`."""
        if submit.request_id in self._requests:
            raise ValueError(f"request {submit.request_id} was submitted twice")
        request = Request(submit, next(self._ages), self._sparse_prompt(submit))
        self._requests[submit.request_id] = request
        if not held:
            self._enqueue(request)

    def _sparse_prompt(self, submit: Generate) -> SparsePrompt | None:
        """For a prompt that may be read in part: it is long, and all of it is text that nobody wants scores of."""
        facts = self._spec_prefill
        if facts is None or not submit.spec_prefill or submit.media or submit.prompt_logprobs is not None:
            return None
        return SparsePrompt(facts) if len(submit.prompt) > facts.least else None

    def release(self, request_id: int) -> None:
        """The background task of a held request is done. Ignores requests that have ended."""
        if (request := self._in_state(request_id, State.HELD)) is not None:
            self._enqueue(request)

    def refuse(self, request_id: int, message: str, *, refused: bool = False) -> list[Event]:
        """The background task of a held request failed. `refused`: because of the client's input."""
        request = self._in_state(request_id, State.HELD)
        return [] if request is None else [self._fail(request, message, refused=refused)]

    def collect(self) -> None:
        """Take in prefixes that were read from disk. Their requests take their places in the queue."""
        for fetched in self._cache.fetched():
            request = self._in_state(fetched.request_id, State.FETCHING)
            if request is not None:
                self._restore += self._cache.restore(request.prefix, fetched)
                request.move(State.WAITING)
                self._wait(request)

    def preempt(self, request_id: int) -> None:
        """Take a request's row away. It starts again when it fits, and its output goes on as if nothing had happened.
        Between two steps only. Ignores requests without a row."""
        request = self._requests.get(request_id)
        if request is not None and request.state in (State.PREFILLING, State.COMPLETING, State.RUNNING):
            self._leave_queue(request)
            request.preempt()
            self._wait(request)

    def cancel(self, request_id: int) -> list[Event]:
        """Ends the request now; the next plan drops its row."""
        request = self._requests.get(request_id)
        return [] if request is None else [self._finish(request, FinishReason.CANCELLED)]

    def handle(self, command: Command) -> list[Event]:
        """`ClearPrefixCache` takes effect with the next plan."""
        self._cache.clear()
        return []

    def cache_bytes(self) -> tuple[int, int]:
        """The bytes of the prefix cache, in memory and on disk."""
        return self._cache.nbytes()

    def kv_tokens(self) -> int:
        """Tokens of all rows, in prefill and in the batch."""
        prefilling = sum(request.prefilled for request in self._prefilling)
        return prefilling + sum(request.kv_row.tokens for request in self._running.values())

    def speculated(self) -> Speculated | None:
        return self._drafts.speculated

    def close(self) -> None:
        """The engine is going: complete writes to disk."""
        self._cache.close()

    def wake_by(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when there is something to `collect`."""
        self._cache.wake_by(wake)

    def plan(self) -> Plan:
        """The next step."""
        self.collect()
        for request in self._room.surplus(self._holding):
            self.preempt(request.request_id)
        restore, self._restore = tuple(self._restore), []
        drop, self._drop = tuple(self._drop), []
        decode = tuple(self._running)
        free_rows = max(0, self._max_rows - len(self._prefilling) - len(self._running))
        waiting = islice(self._waiting, free_rows)
        joining = [request for request in self._joined if request.state is State.RUNNING]
        self._joined.clear()
        self._changes = bool(joining)
        # All chunks before any save: a prompt must not match what another chunk of this very plan will save.
        planned = self._planner.plan(
            self._prefilling, waiting, self._admit, rows=len(self._running), joining=self._changes
        )
        prefill = tuple(map(self._with_save, planned.chunks))
        drafts, choice = self._drafts.choose(
            self._running.values(),
            changes=self._changes,
            fits=lambda depth: self._room.takes_drafts(depth, self._holding),
        )
        for request in joining:
            request.in_batch = True
        orders = self._cache.orders()
        return Plan(
            restore=restore,
            save=tuple(orders.save),
            evict=tuple(orders.evict),
            share=tuple(orders.share),
            drop=drop,
            prefill=prefill,
            decode=decode,
            encode=planned.encode,
            complete_prefill=planned.complete,
            prefill_parts=planned.parts,
            drafts=drafts,
            odds=choice.odds if drafts else None,
            guess=choice.guess,
            tight=self._room.tight,
        )

    def started(self) -> list[Started]:
        """Those that the last plan gave their first row."""
        started, self._started = self._started, []
        return started

    def advance(self, plan: Plan, result: StepResult, seconds: float = 0.0) -> list[Event]:
        """Book a step that succeeded. `seconds`: its duration, if known."""
        self._planner.observe(plan, result, seconds)
        self._drafts.observe(plan, result, seconds, changes=self._changes)
        events: list[Event] = self._prompt_logprobs(result)
        for chunk in plan.prefill:
            self._book_chunk(self._requests[chunk.request.request_id], chunk)
        events += self._join_batch(prefilling=result.prefilling, saving=result.saving)
        for request_id, importance in result.importance:
            if (scored := self._requests.get(request_id)) is not None:
                scored.select(importance)
        for request_id, count in result.encoded:
            self._requests[request_id].encoded = count
        for request_id, tokens in result.shared:
            self._requests[request_id].shared = tokens
        self._exporting = result.exporting
        self._cache.unsaved(result.unsaved)
        self._cache.exported(result.exported)
        events += self._accept_rows(result)
        for failure in result.failed:
            if (failing := self._requests.get(failure.request_id)) is not None:
                # Its chunks of this step may not have run.
                starts = [chunk.start for chunk in plan.prefill if chunk.request.request_id == failure.request_id]
                failing.prefilled = min([failing.prefilled, *starts])
                events.append(self._fail(failing, failure.message, refused=failure.refused))
        return events

    def fail(self, message: str) -> list[Event]:
        """Book a step that raised: every request with a row fails, and the backend drops all rows by itself."""
        events: list[Event] = [self._fail(request, message) for request in [*self._running.values(), *self._prefilling]]
        self._drop.clear()
        self._restore.clear()
        self._exporting = False
        self._drafts.failed()
        self._planner.reset()
        self._cache.reset()
        return events

    def fail_all(self, message: str) -> list[Event]:
        """The engine is going: fail every request."""
        return [self._fail(request, message, gone=True) for request in list(self._requests.values())]

    def _in_state(self, request_id: int, state: State) -> Request | None:
        request = self._requests.get(request_id)
        return request if request is not None and request.state is state else None

    def _enqueue(self, request: Request) -> None:
        if self._cache.fetch_soon(request.prefix):
            request.move(State.FETCHING)
        else:
            request.move(State.WAITING)
            self._wait(request)

    def _wait(self, request: Request) -> None:
        request.arrived = self._planner.clock
        bisect.insort(self._waiting, request, key=lambda each: each.age)
        self._room.freed()

    @property
    def _holding(self) -> list[Request]:
        """Those that hold a row."""
        return [*self._prefilling, *self._running.values()]

    def _admit(self, request: Request) -> Hit | None:
        """Give a waiting request a row, if there is room. Returns its cached prefix."""
        holding = self._holding
        if len(holding) >= self._max_rows or not self._room.takes(request, holding):
            return None
        self._waiting.remove(request)
        request.move(State.PREFILLING)
        self._prefilling.append(request)
        hit = self._cache.match(request.prefix)
        request.start(hit.tokens)
        if request.cached is None:
            self._started.append(Started(request.request_id, hit.tokens))
        return hit

    def _with_save(self, chunk: Prefill) -> Prefill:
        save = self._cache.save_chunk(self._requests[chunk.request.request_id].prefix, chunk.end)
        return chunk if save is None else replace(chunk, save=save)

    def _book_chunk(self, request: Request, chunk: Prefill) -> None:
        if chunk.scores:
            assert request.sparse is not None, "only a sparse prompt is scored"
            request.sparse.scored = chunk.end
            return
        request.prefilled = chunk.end
        if chunk.reuse or chunk.reuse_checkpoint is not None:
            self._cache.release(request.prefix)
        if chunk.joins:
            request.move(State.COMPLETING)

    def _join_batch(self, *, prefilling: bool, saving: bool) -> list[Event]:
        """Requests whose prompts are complete join the batch, unless they want no token. Beside running rows a long one
        is saved in steps before that: both take the host longer than a step. `prefilling`: of some prompts the last
        chunk is still being computed. `saving`: of some, what is saved."""
        joining = []
        for request in self._prefilling:
            if request.state is not State.COMPLETING:
                continue
            if request.saving:
                request.saving += 1
                if saving and request.saving <= SAVING_STEPS:
                    continue
            elif prefilling:
                continue
            elif self._running and self._cache.completed(request.prefix):
                request.saving = 1
                continue
            request.saving = 0
            joining.append(request)
        if joining:
            self._room.joined()
        for request in joining:
            request.move(State.RUNNING)
            self._prefilling.remove(request)
            self._running[request.request_id] = request
            self._joined.append(request)
            request.shared = request.skipped
            self._cache.joined(request.prefix)
        return [self._finish(request, FinishReason.LENGTH) for request in joining if not request.submit.max_tokens]

    def _prompt_logprobs(self, result: StepResult) -> list[Event]:
        """Those that were not sent before their request was preempted."""
        unsent = ((chunk, self._requests[chunk.request_id].unsent(chunk.logprobs)) for chunk in result.prompt_logprobs)
        return [PromptLogprobs(chunk.request_id, logprobs) for chunk, logprobs in unsent if logprobs]

    def _accept_rows(self, result: StepResult) -> list[Event]:
        """The events of all rows. What nearly every row of every step has is one token that ends nothing, and there
        may be hundreds between two steps."""
        request_ids: list[int] = []
        values: list[int] = []
        events: list[Event] = []
        find = self._running.get
        for row in result.rows:
            request_id, tokens = row.request_id, row.tokens
            if (request := find(request_id)) is None:
                continue
            submit = request.submit
            if len(tokens) == 1 and not row.proposed and not row.logprobs and tokens[0] not in submit.stop_tokens:
                token = tokens[0]
                request.tokens.append(token)
                request.generated = generated = request.generated + 1
                request_ids.append(request_id)
                values.append(token)
                if generated >= submit.max_tokens:
                    events.append(self._finish(request, FinishReason.LENGTH))
            else:
                sent, reason = request.accept(row)
                if sent is not None:
                    events.append(sent)
                if reason is not None:
                    events.append(self._finish(request, reason))
        if len(request_ids) >= COLUMNS_FROM:
            events.insert(0, StepTokens(tuple(request_ids), tuple(values)))
        else:
            events[:0] = [Tokens(request_id, (token,)) for request_id, token in zip(request_ids, values, strict=True)]
        return events

    def _finish(self, request: Request, reason: FinishReason) -> Finished:
        self._remove(request)
        request.move(State.FINISHED)
        return Generated(request.request_id, reason, request.usage)

    def _fail(self, request: Request, message: str, *, gone: bool = False, refused: bool = False) -> Failed:
        self._remove(request)
        request.move(State.FAILED)
        return Failed(request.request_id, message, gone, refused)

    def _remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._drafts.forget(request.request_id)
        self._leave_queue(request)

    def _leave_queue(self, request: Request) -> None:
        """A row is dropped by the next plan."""
        self._room.freed()
        match request.state:
            case State.WAITING:
                self._waiting.remove(request)
            case State.PREFILLING | State.COMPLETING:
                self._prefilling.remove(request)
                self._drop.append(request.request_id)
                self._cache.abandoned(request.prefix, request.prefilled)
            case State.RUNNING:
                del self._running[request.request_id]
                self._drop.append(request.request_id)
                self._cache.ended(request.prefix, request.tokens, computed_last=not self._drafts.verified)
