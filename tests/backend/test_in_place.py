"""Slots that kernels write in place, as on CUDA: no array that MLX believes unchanged may share memory with them.

NumPy plays the kernels and writes to the very memory of the slots; everything else is real.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from millstream.backend.generation import assembly, layout
from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.caches.slots import JoiningRows, SlotCaches, SlotLayer
from millstream.backend.generation.caches.widths import kernel_width, powers_of_two
from millstream.backend.generation.layers import attention
from millstream.backend.generation.layout import LayoutChooser
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.generation.messages import Generate
from millstream.engine.link import ThreadLink
from millstream.engine.prefix_cache.orders import SavePrefix
from support.engines import Driver, engine
from support.prefix_caches import caching_scheduler
from support.tiers import some
from support.tiny import VOCAB, write_model


def memory(array: mx.array) -> Any:
    """The memory of an array itself, once all that reads it is done."""
    mx.eval(array)
    mx.synchronize()
    return np.array(array, copy=False)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the kernels."""
    done: list[str] = []

    def place_rows(part: mx.array, rows: mx.array, places: Sequence[int], start: int) -> mx.array:
        done.append("placed")
        memory(part)[list(places), :, start : start + rows.shape[2]] = np.array(rows)
        return mx.array([1])

    def attend(queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any) -> mx.array:
        if isinstance(cache, SlotLayer) and (new := cache.take_new_column()) is not None:
            done.append("written")
            slots = cache.slots
            for part, column in zip(cache.parts, new, strict=True):
                memory(part)[:, :, slots.end] = np.array(column)[: slots.count, :, 0]
            keys, values = cache.parts
            return attention._over_slots(queries, keys, values, cache, scale, None)
        return attention.attention(queries, keys, values, cache, scale, mask)

    monkeypatch.setattr(LayoutChooser, "kernels_write_slots", True)
    monkeypatch.setattr(assembly, "write_rows", place_rows)
    monkeypatch.setattr(layout, "attention", attend)
    return done


def prompts() -> list[tuple[int, ...]]:
    """Prompts whose prefixes come again after other rows have used their slots."""
    known = [tuple((seed * 7 + place * (seed + 3)) % VOCAB for place in range(40)) for seed in range(5)]
    found = []
    for turn in range(30):
        prefix = known[turn * 3 % 5][: 8 + turn % 33]
        found.append((*prefix, *((turn * 5 + place) % VOCAB for place in range(turn % 9))))
    return found


@pytest.mark.parametrize(("groups", "rows"), some([(1, 1), (1, 3), (2, 3)], [(1, 3), (2, 3)]))
def test_no_saved_prefix_is_overwritten(groups: int, rows: int, in_place: list[str], tmp_path: Path) -> None:
    """Slots are reused again and again while prefixes of their rows are saved; with one head of keys the columns of a
    row are contiguous."""
    folder = write_model(tmp_path / "model", "llama", num_key_value_heads=groups)
    plain = functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=rows))
    ours = functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=rows, like_gpu=True))
    submits = [Generate(number, prompt, 3 + number * 5 % 23) for number, prompt in enumerate(prompts())]
    again = [Generate(100 + submit.request_id, submit.prompt, submit.max_tokens) for submit in submits]
    with engine(plain) as driver:
        expected = driver.run(*submits)
    driver = Driver(ThreadLink("in place", ours, functools.partial(caching_scheduler, 10_000, None)))
    driver.start()
    try:
        assert driver.run(*submits) == expected, "cold"
        assert driver.run(*again) == expected, "warm"
    finally:
        driver.stop()
    assert set(in_place) == {"placed", "written"}


def test_a_saved_prefix_shares_no_memory_with_a_slot() -> None:
    """Even where the buffer is hardly larger, so that MLX has no reason to copy it."""

    def place(part: mx.array, rows: mx.array, places: Sequence[int], start: int) -> mx.array:
        memory(part)[list(places), :, start : start + rows.shape[2]] = np.array(rows)
        return mx.array([1])

    slots = SlotCaches(1, powers_of_two, width=kernel_width, write_rows=place)
    slots.join([JoiningRows([(mx.random.normal((1, 1, 112, 16)), mx.random.normal((1, 1, 112, 16)))], (0,))])
    kept = slots.save(0, SavePrefix(1, 0, 16, tuple(range(7)), None, 112), PrefixStore())
    mx.eval(kept)
    before = [np.array(array) for array in kept]
    for part in slots.layers[0].parts:
        memory(part)[:] = 9
    for array, was in zip(kept, before, strict=True):
        np.testing.assert_array_equal(np.array(array), was)


def test_rows_outlast_their_columns(in_place: list[str], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    submits = [
        Generate(0, (5, 6, 7), 300),
        *(Generate(1 + n, (n, 9), 20 + n) for n in range(12)),
        Generate(20, (1, 2), 280),
    ]
    answers = []
    for changes in ({}, {"like_gpu": True}):
        in_place.clear()
        make = functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=4, **changes))
        with engine(make) as driver:
            answers.append(driver.run(*submits))
    assert answers[0] == answers[1]
    assert set(in_place) == {"placed", "written"}


@pytest.mark.parametrize("lost", ["placed", "written"])
def test_a_write_that_is_lost_is_found_at_load(
    lost: str, in_place: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MLX gives a kernel a copy of an array that is not contiguous."""
    if lost == "placed":
        monkeypatch.setattr(assembly, "write_rows", lambda part, rows, places, start: mx.array([1]))
    else:
        monkeypatch.setattr(layout, "attention", never_writing)
    folder = write_model(tmp_path / "model", "llama")
    make = functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=4, like_gpu=True))
    driver = Driver(ThreadLink("lost", make, functools.partial(caching_scheduler, 10_000, None)))
    with pytest.raises(AssertionError, match="--disable kernel"):
        driver.start()


def never_writing(queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any) -> mx.array:
    if isinstance(cache, SlotLayer):
        cache.take_new_column()
        keys, values = cache.parts
        return attention._over_slots(queries, keys, values, cache, scale, None)
    return attention.attention(queries, keys, values, cache, scale, mask)
