"""Between a keeper and the disk: what is there of a prompt's beginning, and what to put there. The owner's alone."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from millstream.engine.generation.backend import ExportedPrefix, SavePrefix
from millstream.engine.generation.request import Request
from millstream.engine.prefix_cache.block_hash import BlockHashes, block_hash, root_hash
from millstream.engine.prefix_cache.disk.block_file import StoredRun
from millstream.engine.prefix_cache.disk.index import Piece
from millstream.engine.prefix_cache.disk.store import DiskStats
from millstream.engine.prefix_cache.index import Contents

CLOSE_SECONDS = 5.0

ASKED_AT_ONCE = 64
"""Keys of states that are asked for together. Each is a hash, and the state is mostly among the last."""

CHECKPOINT_MARK = (0, "#state")
"""Makes the key of a state another than that of the block that it follows."""

Arrived = Callable[[list[StoredRun] | None], None]


class BlockStore(Protocol):
    """See `disk_store.DiskStore`."""

    def match(self, keys: Sequence[str]) -> tuple[Piece, ...]: ...
    def find_first(self, keys: Sequence[str]) -> tuple[int, Piece] | None: ...
    def holds_all(self, keys: Sequence[str]) -> bool: ...
    def write_soon(self, run: StoredRun, keys: Sequence[str]) -> None: ...
    def read_soon(self, pieces: Sequence[Piece], done: Arrived) -> None: ...
    def clear(self) -> None: ...
    def close(self, wait: float) -> None: ...
    def stats(self) -> DiskStats: ...


@dataclass(frozen=True, slots=True)
class DiskMatch:
    """What is on disk of a prompt's first `tokens`, beyond what is in memory."""

    tokens: int
    blocks: tuple[tuple[int, Piece], ...] = ()
    """Pieces of files, each with the number of the block that it begins with."""
    state: Piece | None = None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        blocks = tuple(piece for _, piece in self.blocks)
        return blocks if self.state is None else (*blocks, self.state)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was read for a request; `runs` is None if it could not be."""

    request_id: int
    find: DiskMatch
    runs: list[StoredRun] | None


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A file whose data the backend still has to copy."""

    handles: frozenset[int]
    parent: str
    tokens: tuple[int, ...]
    contents: tuple[tuple[int, str], ...]
    keys: tuple[str, ...]


class DiskTier:
    def __init__(self, store: BlockStore, stamp: str, block: int) -> None:
        self._store = store
        self._block = block
        self._root = root_hash(stamp)
        self._tickets = itertools.count()
        self._awaited: dict[int, _Awaited] = {}
        self._arrivals: queue.SimpleQueue[Fetched] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        """Called on the store's thread when something has arrived."""

    def blocks_of(self, request: Request, tokens: Sequence[int], have: int) -> DiskMatch | None:
        """Whole blocks on disk of a request's `tokens`, where `have` of them are in memory."""
        found = _placed(self._store.match(self._keys(request, tokens)[1:]))
        depth = sum(piece.count for _, piece in found)
        return DiskMatch(depth * self._block, _beyond(found, have)) if depth > have else None

    def state_of(self, request: Request, tokens: Sequence[int], have: int, usable: int) -> DiskMatch | None:
        """The furthest state on disk beyond `usable` tokens, and the blocks before it, of which `have` are in memory.

        A row ends anywhere, and no block of its own goes further: short ends are looked for behind the last block only.
        """
        keys = self._keys(request, tokens)
        found = _placed(self._store.match(keys[1:]))
        depth = max(have, sum(piece.count for _, piece in found))
        ends = [depth * self._block + more for more in range(self._block - 1, 0, -1)]
        ends += [number * self._block for number in range(depth, 0, -1)]
        ends = [end for end in ends if usable < end <= len(tokens)]
        for first in range(0, len(ends), ASKED_AT_ONCE):
            some = ends[first : first + ASKED_AT_ONCE]
            named = [self._state_key(keys, tokens, request.submit.contents, end) for end in some]
            if (state := self._store.find_first(named)) is not None:
                end, piece = some[state[0]], state[1]
                blocks = [(start, run) for start, run in found if start < end // self._block]
                return DiskMatch(end, _beyond(blocks, have), piece)
        return None

    def fetch_soon(self, request_id: int, find: DiskMatch) -> None:
        def arrived(runs: list[StoredRun] | None) -> None:
            self._arrivals.put(Fetched(request_id, find, runs))
            self.wake()

        self._store.read_soon(find.pieces, arrived)

    def arrivals(self) -> Iterable[Fetched]:
        while not self._arrivals.empty():
            yield self._arrivals.get_nowait()

    def ticketed(self, keep: SavePrefix, request: Request, tokens: Sequence[int]) -> SavePrefix:
        """The order, with tickets for what of it is not on disk yet."""
        keys, contents = self._keys(request, tokens), request.submit.contents
        last = keep.first + len(keep.handles)
        named = tuple(keys[keep.first + 1 : last + 1])
        if named and not self._store.holds_all(named):
            span = (keep.first * self._block, last * self._block)
            ticket = self._await(keep.handles, keys[keep.first], tokens, contents, span, named)
            keep = replace(keep, ticket=ticket)
        if keep.state is not None:
            base = (keep.tokens - 1) // self._block
            start = base * self._block
            key = self._state_key(keys, tokens, contents, keep.tokens)
            if not self._store.holds_all((key,)):
                marked = (*contents, (start, CHECKPOINT_MARK[1]))
                ticket = self._await((keep.state,), keys[base], tokens, marked, (start, keep.tokens), (key,))
                keep = replace(keep, checkpoint_ticket=ticket)
        return keep

    def store(self, stored: ExportedPrefix) -> None:
        """The data that a ticket was for. None waits for it if the order was withdrawn."""
        if (awaited := self._awaited.pop(stored.ticket, None)) is None:
            return
        run = StoredRun(
            awaited.parent, self._block, awaited.tokens, awaited.contents, stored.tensors, extra=stored.extra
        )
        self._store.write_soon(run, awaited.keys)

    def lost(self, handles: Iterable[int]) -> None:
        gone = set(handles)
        self._awaited = {ticket: each for ticket, each in self._awaited.items() if not each.handles & gone}

    def reset(self) -> None:
        """The backend has forgotten all tickets."""
        self._awaited.clear()

    def clear(self) -> None:
        self._awaited.clear()
        self._store.clear()

    def close(self) -> None:
        self._store.close(CLOSE_SECONDS)

    def stats(self) -> DiskStats:
        return self._store.stats()

    def _keys(self, request: Request, tokens: Sequence[int]) -> list[str]:
        """Of the whole blocks of `tokens`, which are the beginning of a request's, after the root."""
        if request.chain is None:
            request.chain = BlockHashes(self._root, request.submit.contents, self._block)
        return request.chain.keys(tokens)

    def _state_key(self, keys: Sequence[str], tokens: Sequence[int], contents: Contents, end: int) -> str:
        base = (end - 1) // self._block
        start = base * self._block
        inside = [(place - start, name) for place, name in contents if start <= place < end]
        return block_hash(keys[base], tokens[start:end], [*inside, CHECKPOINT_MARK])

    def _await(
        self,
        handles: Iterable[int],
        parent: str,
        tokens: Sequence[int],
        contents: Contents,
        span: tuple[int, int],
        keys: tuple[str, ...],
    ) -> int:
        start, end = span
        inside = tuple((place - start, name) for place, name in contents if start <= place < end)
        ticket = next(self._tickets)
        self._awaited[ticket] = _Awaited(frozenset(handles), parent, tuple(tokens[start:end]), inside, keys)
        return ticket


def _placed(pieces: Sequence[Piece]) -> list[tuple[int, Piece]]:
    """Each piece with the number of the block that it begins with."""
    starts = itertools.accumulate((piece.count for piece in pieces), initial=0)
    return list(zip(starts, pieces, strict=False))


def _beyond(placed: Iterable[tuple[int, Piece]], have: int) -> tuple[tuple[int, Piece], ...]:
    return tuple((start, piece) for start, piece in placed if start + piece.count > have)
