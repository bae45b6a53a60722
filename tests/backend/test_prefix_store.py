"""Blocks that are forgotten: what is left of a run stays, and its memory is freed when it is cut."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.prefix_cache.orders import SavePrefix

BLOCK = 4


def kept(*runs: tuple[int, ...]) -> PrefixStore:
    """With these handles, four tokens each. A block's numbers are its handle."""
    subject = PrefixStore()
    for handles in runs:
        numbers = mx.repeat(mx.array(handles, dtype=mx.float32), BLOCK).reshape(1, 1, -1, 1)
        mx.eval(subject.keep(handles, [(numbers, -numbers)]))
    return subject


def restored(subject: PrefixStore, *handles: int) -> list[float]:
    cache = KVCache()
    subject.restore(handles, None, [cache])
    keys, _ = cache.keys_and_values()
    return keys.reshape(-1)[::BLOCK].tolist()


def test_a_run_is_cut_when_it_is_trimmed_and_not_before() -> None:
    subject = kept((1, 2, 3, 4))
    whole = subject.nbytes
    subject.forget([4, 3])
    assert (subject.loose, subject.nbytes) == (1, whole)
    assert restored(subject, 1, 2) == [1, 2]
    mx.eval(subject.trim())
    assert (subject.loose, subject.nbytes) == (0, whole // 2)
    assert restored(subject, 1, 2) == [1, 2]


def test_a_run_of_which_nothing_is_left_is_freed_at_once() -> None:
    subject = kept((1, 2), (3, 4))
    whole = subject.nbytes
    subject.forget([2])
    subject.forget([1, 4])
    assert (subject.loose, subject.nbytes) == (1, whole // 2), "of the second run, a block is left"
    mx.eval(subject.trim())
    assert (subject.loose, subject.nbytes) == (0, whole // 4)
    assert restored(subject, 3) == [3]
    subject.forget([3])
    assert (subject.loose, subject.nbytes) == (0, 0)


def test_nothing_is_loose_after_all_is_forgotten() -> None:
    subject = kept((1, 2))
    subject.forget([2])
    subject.clear()
    assert (subject.loose, subject.nbytes) == (0, 0)


def test_states_are_freed_at_once() -> None:
    subject = PrefixStore()
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 3, 2)), mx.ones((1, 1, 3, 2)))
    mx.eval(subject.keep_row(SavePrefix(1, 0, BLOCK, (), state=9, tokens=3), [cache]))
    assert subject.nbytes
    subject.forget([9])
    assert (subject.loose, subject.nbytes) == (0, 0)
