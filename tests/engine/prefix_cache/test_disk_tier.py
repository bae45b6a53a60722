"""What a shelf finds, and how much work that is for the owner."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill
from millstream.engine.generation.request import Request
from millstream.engine.prefix_cache import block_hash as block_hashing
from millstream.engine.prefix_cache.block_hash import block_hash, block_hashes, root_hash
from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.checkpoints import CHECKPOINT_EVERY, CheckpointPrefixCache
from millstream.engine.prefix_cache.disk import tier as tiers
from millstream.engine.prefix_cache.disk.index import DiskIndex, Piece
from millstream.engine.prefix_cache.disk.store import DiskStats
from millstream.engine.prefix_cache.disk.tier import ASKED_AT_ONCE, CHECKPOINT_MARK, DiskTier
from millstream.engine.prefix_cache.index import Contents, PrefixIndex

BLOCK = 16
STAMP = "a model"


class CountingStore:
    """An index without files, which counts what it is asked."""

    def __init__(self) -> None:
        self.index = DiskIndex(2**40)
        self.asked = 0

    def match(self, keys: Sequence[str]) -> tuple[Piece, ...]:
        self.asked += 1
        return self.index.match(keys)

    def find_first(self, keys: Sequence[str]) -> tuple[int, Piece] | None:
        self.asked += 1
        found = ((number, self.index.find(key)) for number, key in enumerate(keys))
        return next(((number, piece) for number, piece in found if piece is not None), None)

    def holds_all(self, keys: Sequence[str]) -> bool:
        self.asked += 1
        return all(self.index.holds(key) for key in keys)

    def write_soon(self, run: object, keys: Sequence[str]) -> None:
        raise NotImplementedError

    def read_soon(self, pieces: Sequence[Piece], done: object) -> None:
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError

    def close(self, wait: float) -> None:
        raise NotImplementedError

    def stats(self) -> DiskStats:
        raise NotImplementedError

    def add_blocks(self, tokens: Sequence[int], contents: Contents = ()) -> None:
        keys = block_hashes(root_hash(STAMP), tokens, contents, BLOCK)
        self.index.add(keys, f"blocks {len(tokens)}", 1, root_hash(STAMP))

    def add_state(self, tokens: Sequence[int], contents: Contents = ()) -> None:
        start = (len(tokens) - 1) // BLOCK * BLOCK
        before = [(place, name) for place, name in contents if place < start]
        inside = [(place - start, name) for place, name in contents if start <= place < len(tokens)]
        parent = (root_hash(STAMP), *block_hashes(root_hash(STAMP), tokens[:start], before, BLOCK))[-1]
        key = block_hash(parent, tokens[start:], [*inside, CHECKPOINT_MARK])
        self.index.add([key], f"state {len(tokens)}", 1, parent)


class Hashes:
    """Counts blocks that are hashed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for module in (block_hashing, tiers):
            patch.setattr(module, "block_hash", self._block_hash)

    def _block_hash(self, parent: str, tokens: Sequence[int], contents: Contents = ()) -> str:
        self.count += 1
        return block_hash(parent, tokens, contents)


def keeper(store: CountingStore, *, states: bool) -> BlockPrefixCache:
    index = PrefixIndex(block=BLOCK, block_bytes=1, budget=2**40, from_checkpoints=states)
    shelf = DiskTier(store, STAMP, BLOCK)
    return CheckpointPrefixCache(index, lambda tokens: 1, shelf) if states else BlockPrefixCache(index, shelf)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(number * 7919 % 50021 for number in range(length))


def read_all(keeping: BlockPrefixCache, request: Request) -> int:
    """Read a prompt chunk by chunk, and end it; how many states and runs of blocks are to be written."""
    keeping.begin(request)
    request.prefilled = 0
    tickets = 0
    for stop in sorted({*request.stops, request.prefill_end}):
        chunk = Prefill(request.submit, request.prefilled, stop)
        orders = keeping.orders([chunk], {request.request_id: request})
        keeps = [each.save for each in orders.prefill] + list(orders.keep)
        tickets += sum((keep.export_id is not None) + (keep.checkpoint_export_id is not None) for keep in keeps if keep)
        keeping.was_read(request, chunk)
        request.prefilled = stop
    keeping.joined(request)
    joining = keeping.orders([], {request.request_id: request})
    request.reported = list(range(40))
    orders = keeping.orders([], {request.request_id: request})
    keeping.ended(request)
    for order in (joining, orders, keeping.orders([], {})):
        tickets += sum((keep.export_id is not None) + (keep.checkpoint_export_id is not None) for keep in order.keep)
    return tickets


@pytest.mark.parametrize("states", [True, False])
def test_a_block_is_hashed_once_a_request(monkeypatch: pytest.MonkeyPatch, states: bool) -> None:
    hashes, store = Hashes(monkeypatch), CountingStore()
    keeping = keeper(store, states=states)
    length = 8 * CHECKPOINT_EVERY
    request = Request(Generate(1, prompt(length), 100))
    assert keeping.look_on_disk(request) is None
    tickets = read_all(keeping, request)
    assert tickets == (2 * len({*request.stops}) + 2 if states else 2)
    blocks = (length + 40) // BLOCK
    assert hashes.count <= blocks + tickets + BLOCK, "some were hashed twice"
    assert store.asked <= tickets + 2


@pytest.mark.parametrize("contents", [(), ((3, "cat"), (40, "dog"), (700, "dog"))])
@pytest.mark.parametrize("ends", [(64,), (64, 512), (1600, 64), (1605, 1600), (1611,)])
def test_the_furthest_state_is_found(ends: tuple[int, ...], contents: Contents) -> None:
    """However far from the end of what is on disk it is."""
    store = CountingStore()
    tokens = prompt(2000)
    assert 1600 // BLOCK > ASKED_AT_ONCE
    store.add_blocks(tokens[:1600], contents)
    for end in ends:
        store.add_state(tokens[:end], contents)
    find = keeper(store, states=True).look_on_disk(Request(Generate(1, tokens, 1, contents=tuple(contents))))
    assert find is not None and find.state is not None
    assert (find.tokens, find.state.name) == (max(ends), f"state {max(ends)}")
    assert [piece.name for _, piece in find.blocks] == ["blocks 1600"]


def test_blocks_of_another_image_are_not_found() -> None:
    store = CountingStore()
    tokens = prompt(400)
    store.add_blocks(tokens[:320], [(5, "cat")])
    find = [
        keeper(store, states=False).look_on_disk(Request(Generate(1, tokens, 1, contents=((5, name),))))
        for name in ("cat", "dog")
    ]
    assert find[0] is not None and find[0].tokens == 320
    assert find[1] is None
