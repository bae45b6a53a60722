"""Which rows' beginnings are kept for later requests, and which requests begin with one. Pure, as the scheduler is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from millstream.engine.generation.backend import ExportedPrefix, Prefill, RestorePrefix, SavePrefix
from millstream.engine.generation.request import Request
from millstream.engine.prefix_cache.disk.block_file import StoredRun
from millstream.engine.prefix_cache.disk.index import Piece
from millstream.engine.prefix_cache.disk.tier import DiskMatch, DiskTier, Fetched
from millstream.engine.prefix_cache.index import Hit, Inserted, PrefixIndex

CHECKPOINT_EVERY = 1024
"""States are saved this often in a long prompt, so that one that is changed late is not read from its start."""


@dataclass(slots=True)
class CacheOrders:
    """What a plan asks of the backend besides reading and decoding."""

    prefill: Sequence[Prefill] = ()
    keep: list[SavePrefix] = field(default_factory=list)
    forget: list[int] = field(default_factory=list)


class PrefixCache:
    """Beside a scheduler. A prompt is kept in the step after its row joined the batch, so that others who come find it,
    and with its answer when the row ends, so that the next turn of a conversation does."""

    def __init__(self, index: PrefixIndex, shelf: DiskTier | None = None) -> None:
        """`shelf`: what does not stay in memory, on disk."""
        self._index = index
        self.shelf = shelf
        self._joined: dict[int, Request] = {}
        self._due: dict[int, Request] = {}
        """Whose row has joined the batch, so that its prompt can be kept."""
        self._ended: list[Request] = []
        self._forgotten: list[int] = []

    @property
    def has_orders(self) -> bool:
        return bool(self._forgotten)

    @property
    def nbytes(self) -> int:
        return self._index.nbytes

    def look_on_disk(self, request: Request) -> DiskMatch | None:
        """What to fetch for a request before it begins, if that is worth it."""
        if self.shelf is None or request.submit.prompt_logprobs is not None:
            return None
        tokens, contents = request.submit.prompt[:-1], request.submit.contents
        hit = self._index.match(tokens, contents)
        self._index.release(hit)
        find = self._find(self.shelf, request, tokens, hit)
        worth = find is not None and find.tokens - hit.tokens >= self._index.least * self._index.block
        return find if worth else None

    def take_in(self, request: Request, arrival: Fetched) -> list[RestorePrefix]:
        """What was fetched for a request goes into memory with the next plan, in which the request may begin."""
        if arrival.runs is None:
            return []
        find, contents = arrival.find, request.submit.contents
        tokens = request.submit.prompt[: find.tokens]
        kept = self._index.insert(tokens, contents, self._size_of(find), least=1)
        self._forgotten += kept.evicted
        fresh = range(kept.first, kept.first + len(kept.handles))
        if fresh and (not find.blocks or fresh.start < find.blocks[0][0]):
            # What stood before it in memory has gone since.
            self._forgotten += self._index.remove(kept.handles)
            return []
        loads = [
            load
            for (start, piece), run in zip(find.blocks, arrival.runs, strict=False)
            if (load := self._blocks(start, piece, run, kept)) is not None
        ]
        if kept.state is not None:
            loads.append(RestorePrefix(arrival.runs[-1].tensors, arrival.runs[-1].extra, state=kept.state))
        return loads

    def begin(self, request: Request) -> None:
        """The last token of a prompt is always read anew: it is the first input of the row."""
        if request.submit.prompt_logprobs is not None:
            return  # all of the prompt must be computed
        request.hit = self._index.match(request.submit.prompt[:-1], request.submit.contents)
        request.prefilled = request.hit.tokens

    def was_read(self, request: Request, chunk: Prefill) -> None:
        if chunk.reuse or chunk.reuse_checkpoint is not None:
            self._index.release(request.hit)

    def joined(self, request: Request) -> None:
        """All of its prompt is read; its row joins the batch in the next step."""
        self._joined[request.request_id] = request

    def ended(self, request: Request) -> None:
        """A row has left the batch, or will in the next step."""
        self._due.pop(request.request_id, None)
        if self._joined.pop(request.request_id, None) is None:
            self._ended.append(request)

    def orders(self, prefill: Sequence[Prefill], requests: Mapping[int, Request]) -> CacheOrders:
        """For the next step, whose chunks are `prefill`."""
        orders = CacheOrders(prefill)
        orders.forget, self._forgotten = self._forgotten, []
        self._fill(orders, requests)
        self._ended.clear()
        self._due, self._joined = self._joined, {}
        return orders

    def lost(self, handles: Sequence[int]) -> None:
        """The backend could not keep these."""
        self._forgotten += self._index.remove(handles)
        if self.shelf is not None:
            self.shelf.lost(handles)

    def stored(self, stored: Sequence[ExportedPrefix]) -> None:
        """What the backend has handed out for the disk."""
        for each in stored:
            assert self.shelf is not None, "nobody asked for it"
            self.shelf.store(each)

    def forget(self) -> None:
        """Between two steps: nobody has a hit that is not restored yet."""
        self._forgotten += self._index.clear()
        if self.shelf is not None:
            self.shelf.clear()

    def clear(self) -> None:
        """The backend has lost what it kept."""
        self._index.clear()
        self._forgotten.clear()
        self._joined.clear()
        self._due.clear()
        self._ended.clear()
        if self.shelf is not None:
            self.shelf.reset()

    def _blocks(self, start: int, piece: Piece, run: StoredRun, kept: Inserted) -> RestorePrefix | None:
        """Those of a file's blocks that are wanted: it begins with number `start` of the prompt's."""
        first = max(start, kept.first)
        last = min(start + piece.count, kept.first + len(kept.handles))
        handles = kept.handles[first - kept.first : last - kept.first] if first < last else ()
        if not handles:
            return None
        return RestorePrefix(run.tensors, first=piece.first + first - start, block=self._index.block, handles=handles)

    def _size_of(self, find: DiskMatch) -> int | None:
        """The size of the state that was found."""
        return None

    def _find(self, shelf: DiskTier, request: Request, tokens: tuple[int, ...], hit: Hit) -> DiskMatch | None:
        return shelf.blocks_of(request, tokens, len(hit.handles))

    def _fill(self, orders: CacheOrders, requests: Mapping[int, Request]) -> None:
        # The last token that a row gave may not have been read by it.
        ended = [(request, (*request.submit.prompt, *request.reported[:-1])) for request in self._ended]
        joined = [(request, request.submit.prompt[:-1]) for request in self._due.values()]
        for request, tokens in ended + joined:
            if (keep := self._insert(request, tokens, None, orders)) is not None:
                orders.keep.append(keep)

    def _insert(
        self, request: Request, tokens: tuple[int, ...], state_bytes: int | None, orders: CacheOrders
    ) -> SavePrefix | None:
        kept = self._index.insert(tokens, request.submit.contents, state_bytes)
        orders.forget += kept.evicted
        if not kept.handles and kept.state is None:
            return None
        keep = SavePrefix(request.request_id, kept.first, self._index.block, kept.handles, kept.state, len(tokens))
        return keep if self.shelf is None else self.shelf.ticketed(keep, request, tokens)


class CheckpointPrefixCache(PrefixCache):
    """For models that resume from saved states only. States are saved while a prompt is read: at its last block border,
    where it leaves a known prefix, every `CHECKPOINT_EVERY` tokens, and where a row ended."""

    def __init__(self, index: PrefixIndex, state_bytes: Callable[[int], int], shelf: DiskTier | None = None) -> None:
        """`state_bytes`: how large a state after so many tokens is, at most."""
        if not index.from_states:
            raise ValueError("this index does not go on from states")
        super().__init__(index, shelf)
        self._state_bytes = state_bytes

    def begin(self, request: Request) -> None:
        super().begin(request)
        block, start, end = self._index.block, request.prefilled, request.prefill_end
        if end // block - start // block < self._index.least:
            return
        spaced = range((start // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY, end, CHECKPOINT_EVERY)
        places = {request.hit.shared, end // block * block, *(place // block * block for place in spaced)}
        request.stops = tuple(sorted(place for place in places if start < place <= end))

    def _find(self, shelf: DiskTier, request: Request, tokens: tuple[int, ...], hit: Hit) -> DiskMatch | None:
        return shelf.state_of(request, tokens, hit.shared // self._index.block, hit.tokens)

    def _size_of(self, find: DiskMatch) -> int | None:
        return self._state_bytes(find.tokens)

    def _fill(self, orders: CacheOrders, requests: Mapping[int, Request]) -> None:
        orders.prefill = [self._saving(chunk, requests[chunk.request.request_id], orders) for chunk in orders.prefill]
        for request in self._ended:
            tokens = (*request.submit.prompt, *request.reported)
            new = len(tokens) - request.stops[-1] if request.stops else len(tokens)
            if new // self._index.block < self._index.least - 1:
                continue
            if (keep := self._insert(request, tokens, self._state_bytes(len(tokens)), orders)) is not None:
                orders.keep.append(keep)

    def _saving(self, chunk: Prefill, request: Request, orders: CacheOrders) -> Prefill:
        if chunk.end not in request.stops:
            return chunk
        tokens = request.submit.prompt[: chunk.end]
        return replace(chunk, save=self._insert(request, tokens, self._state_bytes(len(tokens)), orders))
