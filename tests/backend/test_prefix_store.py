"""Eviction of KV blocks: the rest of a run stays usable, and compacting it frees the memory of evicted blocks."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.prefix_cache.orders import SavePrefix

BLOCK = 4


def store_with(*runs: tuple[int, ...]) -> PrefixStore:
    """A store with these handles, four tokens each. The values of a block are its handle."""
    store = PrefixStore()
    for handles in runs:
        values = mx.repeat(mx.array(handles, dtype=mx.float32), BLOCK).reshape(1, 1, -1, 1)
        mx.eval(store.save(handles, [(values, -values)]))
    return store


def restored(store: PrefixStore, *handles: int) -> list[float]:
    cache = KVCache()
    store.fill_caches(handles, None, [cache])
    keys, _ = cache.keys_and_values()
    return keys.reshape(-1)[::BLOCK].tolist()


def test_a_partly_evicted_run_keeps_its_memory_until_it_is_compacted() -> None:
    store = store_with((1, 2, 3, 4))
    full = store.nbytes
    store.evict([4, 3])
    assert (store.compactable, store.nbytes) == (1, full)
    assert restored(store, 1, 2) == [1, 2]
    mx.eval(store.compact())
    assert (store.compactable, store.nbytes) == (0, full // 2)
    assert restored(store, 1, 2) == [1, 2]


def test_a_fully_evicted_run_is_freed_at_once() -> None:
    store = store_with((1, 2), (3, 4))
    full = store.nbytes
    store.evict([2])
    store.evict([1, 4])
    assert (store.compactable, store.nbytes) == (1, full // 2), "the second run still has a block"
    mx.eval(store.compact())
    assert (store.compactable, store.nbytes) == (0, full // 4)
    assert restored(store, 3) == [3]
    store.evict([3])
    assert (store.compactable, store.nbytes) == (0, 0)


def test_nothing_is_compactable_after_clear() -> None:
    store = store_with((1, 2))
    store.evict([2])
    store.clear()
    assert (store.compactable, store.nbytes) == (0, 0)


def test_checkpoints_are_freed_at_once() -> None:
    store = PrefixStore()
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 3, 2)), mx.ones((1, 1, 3, 2)))
    mx.eval(store.save_row(SavePrefix(1, 0, BLOCK, (), checkpoint=9, tokens=3), [cache]))
    assert store.nbytes
    store.evict([9])
    assert (store.compactable, store.nbytes) == (0, 0)
