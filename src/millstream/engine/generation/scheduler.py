"""Who runs in the next step. A pure object: no thread, clock, MLX or I/O, so every interleaving can be tested."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from millstream.engine.generation.backend import EncodeMedia, Plan, Prefill, RestorePrefix, RowOutput, StepResult
from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.request import Request, State
from millstream.engine.messages import Event, Failed, Finished, PromptLogprobs, Submit, Tokens
from millstream.engine.prefix_cache.cache import PrefixCache
from millstream.types import FinishReason


class Scheduler:
    """Keeps requests in order, cuts prompts into chunks, and turns a step's result into events.

    At most `max_rows` requests hold a row (prefilling or running). A step spends at most `prefill_tokens` on prompts,
    oldest first. Beside running rows, one prompt gets at most `pace.chunk` of it: many short prompts may share a
    step, but a long one is cut finely, so that the rows keep their pace.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        prefill_tokens: int,
        pace: ChunkSizer | None = None,
        kv_tokens: int | None = None,
        keeper: PrefixCache | None = None,
        whole_media: bool = False,
    ) -> None:
        """`kv_tokens`: how many tokens fit into memory. A batch is a rectangle, so its longest row counts for all.
        `keeper`: keeps beginnings of prompts. `whole_media`: no chunk may end inside an image."""
        if max_rows < 1 or prefill_tokens < 1:
            raise ValueError("max_rows and prefill_tokens must be at least 1")
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._kv_tokens = kv_tokens
        self._keeper = keeper
        self._whole_media = whole_media
        self._pace = pace or ChunkSizer(most=prefill_tokens, least=prefill_tokens)
        self._requests: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._late: list[Request] = []
        """Whose last chunk is still being computed."""
        self._running: dict[int, Request] = {}
        self._drop: list[int] = []
        self._held: dict[int, Request] = {}
        self._fetching: dict[int, Request] = {}
        self._load: list[RestorePrefix] = []
        self._storing = self._reading = False

    @property
    def idle(self) -> bool:
        """Nothing to plan: the owner may sleep until mail comes."""
        orders = self._keeper is not None and self._keeper.has_orders
        elsewhere = len(self._fetching) + len(self._held)
        return not (len(self._requests) > elsewhere or self._drop or self._load or self._storing or orders)

    def submit(self, submit: Submit, *, held: bool = False) -> None:
        """`held`: outside the queue, until `release` or `refuse`."""
        if submit.request_id in self._requests:
            raise ValueError(f"request {submit.request_id} was submitted twice")
        request = Request(submit)
        self._requests[submit.request_id] = request
        if held:
            self._held[submit.request_id] = request
        else:
            self._enqueue(request)

    def release(self, request_id: int) -> None:
        """What a held request waited for is done. One that has left meanwhile is not missed."""
        if (request := self._held.pop(request_id, None)) is not None:
            self._enqueue(request)

    def refuse(self, request_id: int, message: str, *, refused: bool = False) -> list[Event]:
        """What a held request waited for cannot be done. `refused`: because of what the client sent."""
        request = self._held.get(request_id)
        return [] if request is None else [self._fail(request, message, refused=refused)]

    def collect(self) -> None:
        """Take in what was fetched from disk. Those who waited for it go first: they have waited."""
        keeper = self._keeper
        if keeper is None or keeper.shelf is None:
            return
        for arrival in keeper.shelf.arrivals():
            request = self._fetching.pop(arrival.request_id, None)
            if request is not None:
                self._load += keeper.take_in(request, arrival)
                self._waiting.appendleft(request)

    def cancel(self, request_id: int) -> list[Event]:
        """Ends the request now; its row is dropped at the start of the next plan."""
        request = self._requests.get(request_id)
        return [] if request is None else [self._finish(request, FinishReason.CANCELLED)]

    def forget(self) -> None:
        """Keep nothing of what was read so far; from the next plan on."""
        if self._keeper is not None:
            self._keeper.forget()

    def cache_bytes(self) -> tuple[int, int]:
        """What is kept of earlier prompts, in memory and on disk."""
        if self._keeper is None:
            return 0, 0
        return self._keeper.nbytes, 0 if self._keeper.shelf is None else self._keeper.shelf.stats().bytes

    def close(self) -> None:
        """The engine is going: finish what is being written to disk."""
        if self._keeper is not None and self._keeper.shelf is not None:
            self._keeper.shelf.close()

    def wake_by(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when there is something to `collect`."""
        if self._keeper is not None and self._keeper.shelf is not None:
            self._keeper.shelf.wake = wake

    def plan(self) -> Plan:
        self.collect()
        load, self._load = tuple(self._load), []
        drop, self._drop = tuple(self._drop), []
        decode = tuple(self._running)
        prefill = () if self._reading and self._running else tuple(self._chunks())
        look = self._look()
        if self._keeper is None:
            return Plan(drop=drop, prefill=prefill, decode=decode, encode=look)
        orders = self._keeper.orders(prefill, self._requests)
        return Plan(
            restore=load,
            save=tuple(orders.keep),
            evict=tuple(orders.forget),
            drop=drop,
            prefill=tuple(orders.prefill),
            decode=decode,
            encode=look,
        )

    def advance(self, plan: Plan, result: StepResult, seconds: float = 0.0) -> list[Event]:
        """Book a step that succeeded, and how long it took if that is known."""
        read = sum(chunk.end - chunk.start for chunk in plan.prefill)
        if plan.encode:
            self._pace.disturbed()
        self._pace.observe(rows=len(plan.decode), prompt_tokens=read, seconds=seconds, reading=result.prefilling)
        events: list[Event] = [PromptLogprobs(scores.request_id, scores.logprobs) for scores in result.prompt_logprobs]
        for chunk in plan.prefill:
            request = self._requests[chunk.request.request_id]
            request.prefilled = chunk.end
            if self._keeper is not None:
                self._keeper.was_read(request, chunk)
            if chunk.joins:
                self._late.append(request)
        if not result.prefilling:
            events += self._join_late()
        for request_id, count in result.encoded:
            self._requests[request_id].seen = count
        self._storing, self._reading = result.exporting, result.prefilling
        if self._keeper is not None:
            self._keeper.lost(result.unsaved)
            self._keeper.stored(result.exported)
        for row in result.rows:
            running = self._running.get(row.request_id)
            if running is not None:
                events.extend(self._accept(running, row))
        for failure in result.failed:
            if (failing := self._requests.get(failure.request_id)) is not None:
                events.append(self._fail(failing, failure.message, refused=failure.refused))
        return events

    def _join_late(self) -> list[Event]:
        """Whose prompts are read join the batch, unless they are to do no more."""
        late, self._late = self._late, []
        for request in late:
            request.move(State.RUNNING)
            self._prefilling.remove(request)
            self._running[request.request_id] = request
            if self._keeper is not None:
                self._keeper.joined(request)
        return [self._finish(request, FinishReason.LENGTH) for request in late if not request.submit.max_tokens]

    def fail(self, message: str) -> list[Event]:
        """Book a step that raised: everyone who has a row fails, and the backend forgets all rows by itself."""
        events: list[Event] = [self._fail(request, message) for request in [*self._running.values(), *self._prefilling]]
        self._drop.clear()
        self._load.clear()
        self._storing = self._reading = False
        if self._keeper is not None:
            self._keeper.clear()
        return events

    def fail_all(self, message: str) -> list[Event]:
        """The engine is going: tell everyone."""
        return [self._fail(request, message, gone=True) for request in list(self._requests.values())]

    def _enqueue(self, request: Request) -> None:
        keeper = self._keeper
        if keeper is not None and keeper.shelf is not None and (find := keeper.look_on_disk(request)) is not None:
            self._fetching[request.request_id] = request
            keeper.shelf.fetch_soon(request.request_id, find)
        else:
            self._waiting.append(request)

    def _chunks(self) -> Iterator[Prefill]:
        """Spend the budget, oldest first. A request gets a row only together with its first chunk."""
        budget = self._prefill_tokens
        for request in self._prefilling:
            if budget > 0 and request not in self._late:
                chunk = self._chunk(request, budget)
                if chunk.end > chunk.start or chunk.joins:
                    yield chunk
                    budget -= max(1, chunk.end - chunk.start)
        while budget > 0 and self._waiting and self._has_room(self._waiting[0]):
            request = self._waiting.popleft()
            request.move(State.PREFILLING)
            self._prefilling.append(request)
            if self._keeper is not None:
                self._keeper.begin(request)
            chunk = self._chunk(request, budget)
            hit = request.hit
            yield replace(chunk, reuse=hit.handles, reuse_checkpoint=hit.state) if hit.tokens else chunk
            # A one-token prompt has nothing to prefill and still costs its row a place in the step.
            budget -= max(1, chunk.end - chunk.start)

    def _has_room(self, request: Request) -> bool:
        rows = len(self._prefilling) + len(self._running)
        if self._kv_tokens is None or not rows:
            return rows < self._max_rows
        longest = max(each.most_tokens for each in (request, *self._prefilling, *self._running.values()))
        return rows < self._max_rows and (rows + 1) * longest <= self._kv_tokens

    def _chunk(self, request: Request, budget: int) -> Prefill:
        start = request.prefilled
        if self._running:
            budget = min(budget, self._pace.limit(request.prefill_end - start))
        stop = next((place for place in request.stops if place > start), request.prefill_end)
        end = min(stop, start + budget)
        return Prefill(
            request.submit, start, request.reach(end, whole=self._whole_media) if request.submit.media else end
        )

    def _look(self) -> tuple[EncodeMedia, ...]:
        """The oldest request that waits for its media; one a step, beside running rows for as long as a chunk takes."""
        for request in self._prefilling:
            if request.submit.media and (first := request.unseen) is not None:
                return (
                    EncodeMedia(request.submit, first, self._pace.chunk if self._running else self._prefill_tokens),
                )
        return ()

    def _accept(self, request: Request, row: RowOutput) -> Iterable[Event]:
        """Cut a row's output at the first stop token or at the limit."""
        submit = request.submit
        kept = 0
        reason: FinishReason | None = None
        for token in row.tokens:
            request.generated += 1
            if token in submit.stop_tokens:
                reason = FinishReason.STOP
                break
            kept += 1
            if request.generated >= submit.max_tokens:
                reason = FinishReason.LENGTH
                break
        if self._keeper is not None:
            request.reported += row.tokens
        if kept:
            yield Tokens(submit.request_id, row.tokens[:kept], row.logprobs[:kept])
        if reason is not None:
            yield self._finish(request, reason)

    def _finish(self, request: Request, reason: FinishReason) -> Finished:
        self._remove(request)
        request.move(State.FINISHED)
        return Finished(request.request_id, reason, request.usage)

    def _fail(self, request: Request, message: str, *, gone: bool = False, refused: bool = False) -> Failed:
        self._remove(request)
        request.move(State.FAILED)
        return Failed(request.request_id, message, gone, refused)

    def _remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        if request.state is State.WAITING:
            outside = self._held if request.request_id in self._held else self._fetching
            if outside.pop(request.request_id, None) is None:
                self._waiting.remove(request)
        elif request.state is State.PREFILLING:
            self._prefilling.remove(request)
            self._late = [late for late in self._late if late is not request]
            self._drop.append(request.request_id)
        else:
            del self._running[request.request_id]
            self._drop.append(request.request_id)
            if self._keeper is not None:
                self._keeper.ended(request)
