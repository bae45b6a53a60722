"""The disk tier of the prefix cache: what is on disk of a prompt's prefix, and what to write there. Owner only.

It names data by block hashes and leaves files to the store, whose threads read and write.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from millstream.engine.prefix_cache.block_hash import BlockHashes, block_hash, root_hash
from millstream.engine.prefix_cache.disk.block_file import StoredRun
from millstream.engine.prefix_cache.disk.index import Piece
from millstream.engine.prefix_cache.disk.store import DiskStats
from millstream.engine.prefix_cache.index import Contents
from millstream.engine.prefix_cache.orders import ExportedPrefix, SavePrefix
from millstream.engine.prefix_cache.prompt import CachedPrompt

CLOSE_SECONDS = 5.0

ASKED_AT_ONCE = 64
"""Hashes of checkpoints that are looked up together. Each costs a hash, and the match is mostly among the last."""

CHECKPOINT_MARK = (0, "#state")
"""Makes the hash of a checkpoint differ from that of the block that it follows."""

OnRead = Callable[[list[StoredRun] | None], None]


class BlockStore(Protocol):
    """See `store.DiskStore`."""

    def match(self, keys: Sequence[str]) -> tuple[Piece, ...]: ...
    def find_first(self, keys: Sequence[str]) -> tuple[int, Piece] | None: ...
    def holds_all(self, keys: Sequence[str]) -> bool: ...
    def write_soon(self, run: StoredRun, keys: Sequence[str]) -> None: ...
    def read_soon(self, pieces: Sequence[Piece], done: OnRead) -> None: ...
    def clear(self) -> None: ...
    def close(self, wait: float) -> None: ...
    def stats(self) -> DiskStats: ...


@dataclass(frozen=True, slots=True)
class DiskMatch:
    """What the disk holds of a prompt's first `tokens`, beyond what is in memory."""

    tokens: int
    blocks: tuple[tuple[int, Piece], ...] = ()
    """Parts of files, each with the number of its first block."""
    checkpoint: Piece | None = None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        blocks = tuple(piece for _, piece in self.blocks)
        return blocks if self.checkpoint is None else (*blocks, self.checkpoint)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The data that was read for a request; `runs` is None if the read failed."""

    request_id: int
    match: DiskMatch
    runs: list[StoredRun] | None


@dataclass(frozen=True, slots=True)
class _PendingExport:
    """A file whose data the backend still has to copy."""

    handles: frozenset[int]
    parent: str
    tokens: tuple[int, ...]
    contents: tuple[tuple[int, str], ...]
    keys: tuple[str, ...]


class Tier(Protocol):
    """`DiskTier`, or `NullDiskTier` where nothing is stored."""

    wake: Callable[[], None]

    @property
    def nbytes(self) -> int: ...
    def match_blocks(self, prompt: CachedPrompt, tokens: Sequence[int], have: int) -> DiskMatch | None: ...
    def match_checkpoint(
        self, prompt: CachedPrompt, tokens: Sequence[int], have: int, usable: int
    ) -> DiskMatch | None: ...
    def fetch_soon(self, request_id: int, match: DiskMatch) -> None: ...
    def fetched(self) -> Iterable[Fetched]: ...
    def with_exports(self, order: SavePrefix, prompt: CachedPrompt, tokens: Sequence[int]) -> SavePrefix: ...
    def write(self, exported: ExportedPrefix) -> None: ...
    def cancel_exports(self, handles: Iterable[int]) -> None: ...
    def reset(self) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


class NullDiskTier:
    """Stores nothing."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.nbytes = 0

    def match_blocks(self, prompt: CachedPrompt, tokens: Sequence[int], have: int) -> DiskMatch | None:
        return None

    def match_checkpoint(self, prompt: CachedPrompt, tokens: Sequence[int], have: int, usable: int) -> DiskMatch | None:
        return None

    def fetch_soon(self, request_id: int, match: DiskMatch) -> None:
        raise AssertionError("nothing is stored, so nothing is fetched")

    def fetched(self) -> Iterable[Fetched]:
        return ()

    def with_exports(self, order: SavePrefix, prompt: CachedPrompt, tokens: Sequence[int]) -> SavePrefix:
        return order

    def write(self, exported: ExportedPrefix) -> None:
        raise AssertionError("nothing was to be exported")

    def cancel_exports(self, handles: Iterable[int]) -> None:
        """Nothing is exported."""

    def reset(self) -> None:
        """Nothing is exported."""

    def clear(self) -> None:
        """Nothing is stored."""

    def close(self) -> None:
        """Nothing is stored."""


class DiskTier:
    """Files in a `BlockStore`, found by the hashes of a prompt's blocks."""

    def __init__(self, store: BlockStore, stamp: str, block: int) -> None:
        self._store = store
        self._block = block
        self._root = root_hash(stamp)
        self._export_ids = itertools.count()
        self._pending: dict[int, _PendingExport] = {}
        self._fetched: queue.SimpleQueue[Fetched] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        """Called on the store's thread when a read has completed."""

    @property
    def nbytes(self) -> int:
        return self._store.stats().bytes

    def match_blocks(self, prompt: CachedPrompt, tokens: Sequence[int], have: int) -> DiskMatch | None:
        """Whole blocks on disk of a prompt's `tokens`, where `have` of them are in memory."""
        found = _numbered(self._store.match(self._hashes(prompt, tokens)[1:]))
        depth = sum(piece.count for _, piece in found)
        return DiskMatch(depth * self._block, _beyond(found, have)) if depth > have else None

    def match_checkpoint(self, prompt: CachedPrompt, tokens: Sequence[int], have: int, usable: int) -> DiskMatch | None:
        """The furthest checkpoint on disk beyond `usable` tokens, and the blocks before it, of which `have` are in
        memory.

        A row ends anywhere, and no block of its own goes further: positions inside a block are looked up behind the
        last block only.
        """
        hashes = self._hashes(prompt, tokens)
        found = _numbered(self._store.match(hashes[1:]))
        depth = max(have, sum(piece.count for _, piece in found))
        ends = [depth * self._block + more for more in range(self._block - 1, 0, -1)]
        ends += [number * self._block for number in range(depth, 0, -1)]
        ends = [end for end in ends if usable < end <= len(tokens)]
        for first in range(0, len(ends), ASKED_AT_ONCE):
            some = ends[first : first + ASKED_AT_ONCE]
            named = [self._checkpoint_hash(hashes, tokens, prompt.contents, end) for end in some]
            if (checkpoint := self._store.find_first(named)) is not None:
                end, piece = some[checkpoint[0]], checkpoint[1]
                blocks = [(start, run) for start, run in found if start < end // self._block]
                return DiskMatch(end, _beyond(blocks, have), piece)
        return None

    def fetch_soon(self, request_id: int, match: DiskMatch) -> None:
        def on_read(runs: list[StoredRun] | None) -> None:
            self._fetched.put(Fetched(request_id, match, runs))
            self.wake()

        self._store.read_soon(match.pieces, on_read)

    def fetched(self) -> Iterable[Fetched]:
        while not self._fetched.empty():
            yield self._fetched.get_nowait()

    def with_exports(self, order: SavePrefix, prompt: CachedPrompt, tokens: Sequence[int]) -> SavePrefix:
        """The order, with export ids for what is not on disk yet."""
        hashes, contents = self._hashes(prompt, tokens), prompt.contents
        last = order.first + len(order.handles)
        named = tuple(hashes[order.first + 1 : last + 1])
        if named and not self._store.holds_all(named):
            span = (order.first * self._block, last * self._block)
            export_id = self._expect(order.handles, hashes[order.first], tokens, contents, span, named)
            order = replace(order, export_id=export_id)
        if order.checkpoint is not None:
            base = (order.tokens - 1) // self._block
            start = base * self._block
            key = self._checkpoint_hash(hashes, tokens, contents, order.tokens)
            if not self._store.holds_all((key,)):
                marked = (*contents, (start, CHECKPOINT_MARK[1]))
                span = (start, order.tokens)
                export_id = self._expect((order.checkpoint,), hashes[base], tokens, marked, span, (key,))
                order = replace(order, checkpoint_export_id=export_id)
        return order

    def write(self, exported: ExportedPrefix) -> None:
        """Write exported data, unless its order was withdrawn."""
        if (pending := self._pending.pop(exported.export_id, None)) is None:
            return
        run = StoredRun(
            pending.parent, self._block, pending.tokens, pending.contents, exported.tensors, extra=exported.extra
        )
        self._store.write_soon(run, pending.keys)

    def cancel_exports(self, handles: Iterable[int]) -> None:
        gone = set(handles)
        self._pending = {number: each for number, each in self._pending.items() if not each.handles & gone}

    def reset(self) -> None:
        """The backend has dropped all exports."""
        self._pending.clear()

    def clear(self) -> None:
        self._pending.clear()
        self._store.clear()

    def close(self) -> None:
        self._store.close(CLOSE_SECONDS)

    def _hashes(self, prompt: CachedPrompt, tokens: Sequence[int]) -> list[str]:
        """The root's, and those of the whole blocks of `tokens`, which extend or begin the prompt."""
        if prompt.hashes is None:
            prompt.hashes = BlockHashes(self._root, prompt.contents, self._block)
        return prompt.hashes.keys(tokens)

    def _checkpoint_hash(self, hashes: Sequence[str], tokens: Sequence[int], contents: Contents, end: int) -> str:
        base = (end - 1) // self._block
        start = base * self._block
        inside = [(position - start, name) for position, name in contents if start <= position < end]
        return block_hash(hashes[base], tokens[start:end], [*inside, CHECKPOINT_MARK])

    def _expect(
        self,
        handles: Iterable[int],
        parent: str,
        tokens: Sequence[int],
        contents: Contents,
        span: tuple[int, int],
        keys: tuple[str, ...],
    ) -> int:
        start, end = span
        inside = tuple((position - start, name) for position, name in contents if start <= position < end)
        export_id = next(self._export_ids)
        self._pending[export_id] = _PendingExport(frozenset(handles), parent, tuple(tokens[start:end]), inside, keys)
        return export_id


def _numbered(pieces: Sequence[Piece]) -> list[tuple[int, Piece]]:
    """Each piece with the number of its first block."""
    starts = itertools.accumulate((piece.count for piece in pieces), initial=0)
    return list(zip(starts, pieces, strict=False))


def _beyond(numbered: Iterable[tuple[int, Piece]], have: int) -> tuple[tuple[int, Piece], ...]:
    return tuple((start, piece) for start, piece in numbered if start + piece.count > have)
