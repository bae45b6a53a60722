"""What the disk tier matches, and how much work that is for the owner."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from millstream.engine.prefix_cache import block_hash as block_hashing
from millstream.engine.prefix_cache.block_hash import block_hash, block_hashes, root_hash
from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.checkpoints import CHECKPOINT_EVERY, CheckpointPrefixCache
from millstream.engine.prefix_cache.disk import tier as tiers
from millstream.engine.prefix_cache.disk.index import DiskIndex, Piece
from millstream.engine.prefix_cache.disk.store import DiskStats
from millstream.engine.prefix_cache.disk.tier import ASKED_AT_ONCE, CHECKPOINT_MARK, DiskTier
from millstream.engine.prefix_cache.index import Contents, PrefixIndex
from millstream.engine.prefix_cache.orders import SavePrefix
from millstream.engine.prefix_cache.prompt import CachedPrompt

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

    def add_checkpoint(self, tokens: Sequence[int], contents: Contents = ()) -> None:
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


def prefix_cache(store: CountingStore, *, states: bool) -> BlockPrefixCache:
    index = PrefixIndex(block=BLOCK, block_bytes=1, budget=2**40, from_checkpoints=states)
    tier = DiskTier(store, STAMP, BLOCK)
    return CheckpointPrefixCache(index, lambda tokens: 1, tier) if states else BlockPrefixCache(index, tier)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(number * 7919 % 50021 for number in range(length))


def exports(orders: list[SavePrefix | None]) -> int:
    return sum((o.export_id is not None) + (o.checkpoint_export_id is not None) for o in orders if o is not None)


def prefill_all(cache: BlockPrefixCache, prompt: CachedPrompt) -> int:
    """Prefill a prompt chunk by chunk and end its row; how many checkpoints and runs of blocks are to be written."""
    cache.match(prompt)
    count = 0
    for end in sorted({*prompt.checkpoints, len(prompt.tokens) - 1}):
        count += exports([cache.save_chunk(prompt, end), *cache.orders().save])
    cache.joined(prompt)
    orders = [*cache.orders().save, *cache.orders().save]
    cache.ended(prompt, list(range(40)))
    return count + exports([*orders, *cache.orders().save])


@pytest.mark.parametrize("states", [True, False])
def test_a_block_is_hashed_once_a_request(monkeypatch: pytest.MonkeyPatch, states: bool) -> None:
    hashes, store = Hashes(monkeypatch), CountingStore()
    cache = prefix_cache(store, states=states)
    length = 8 * CHECKPOINT_EVERY
    cached = CachedPrompt(1, prompt(length))
    assert cache.match_on_disk(cached) is None
    written = prefill_all(cache, cached)
    assert written == (2 * len({*cached.checkpoints}) + 2 if states else 2)
    blocks = (length + 40) // BLOCK
    assert hashes.count <= blocks + written + BLOCK, "some were hashed twice"
    assert store.asked <= written + 2


@pytest.mark.parametrize("contents", [(), ((3, "cat"), (40, "dog"), (700, "dog"))])
@pytest.mark.parametrize("ends", [(64,), (64, 512), (1600, 64), (1605, 1600), (1611,)])
def test_the_furthest_state_is_found(ends: tuple[int, ...], contents: Contents) -> None:
    """However far from the end of what is on disk it is."""
    store = CountingStore()
    tokens = prompt(2000)
    assert 1600 // BLOCK > ASKED_AT_ONCE
    store.add_blocks(tokens[:1600], contents)
    for end in ends:
        store.add_checkpoint(tokens[:end], contents)
    find = prefix_cache(store, states=True).match_on_disk(CachedPrompt(1, tokens, tuple(contents)))
    assert find is not None and find.checkpoint is not None
    assert (find.tokens, find.checkpoint.name) == (max(ends), f"state {max(ends)}")
    assert [piece.name for _, piece in find.blocks] == ["blocks 1600"]


def test_blocks_of_another_image_are_not_found() -> None:
    store = CountingStore()
    tokens = prompt(400)
    store.add_blocks(tokens[:320], [(5, "cat")])
    find = [
        prefix_cache(store, states=False).match_on_disk(CachedPrompt(1, tokens, ((5, name),)))
        for name in ("cat", "dog")
    ]
    assert find[0] is not None and find[0].tokens == 320
    assert find[1] is None
