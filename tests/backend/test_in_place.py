"""Slabs that kernels write in place, as on CUDA: no array that MLX believes unchanged may share memory with them.

NumPy plays the kernels and writes to the very memory of the slabs; everything else is real.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.caches import kernel_slabs
from millstream.backend.generation.caches.class_caches import ClassCaches
from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.caches.widths import kernel_width, powers_of_two
from millstream.backend.generation.layers import attention
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.generation.messages import Generate
from millstream.engine.link import ThreadLink
from millstream.engine.prefix_cache.orders import SavePrefix
from support.engines import Driver, engine
from support.pointer_kernels import PointerKernels, memory
from support.prefix_caches import caching_scheduler
from support.rare import RARE, write_rare
from support.tiers import some
from support.tiny import VOCAB, write_model


def decodes(kernels: PointerKernels) -> bool:
    """Whether rows decoded, each in one part or in several: that depends on the shape of a layer."""
    return bool({"decode", "parted decode"} & set(kernels.calls))


def prompts() -> list[tuple[int, ...]]:
    """Prompts whose prefixes come again after other rows have used their slots."""
    known = [tuple((seed * 7 + place * (seed + 3)) % VOCAB for place in range(40)) for seed in range(5)]
    found = []
    for turn in range(30):
        prefix = known[turn * 3 % 5][: 8 + turn % 33]
        found.append((*prefix, *((turn * 5 + place) % VOCAB for place in range(turn % 9))))
    return found


@pytest.mark.parametrize(("groups", "rows"), some([(1, 1), (1, 3), (2, 3)], [(2, 3)]))
def test_no_saved_prefix_is_overwritten(groups: int, rows: int, kernels: PointerKernels, tmp_path: Path) -> None:
    """Slots are reused again and again while prefixes of their rows are saved; with one head of keys the columns of a
    row are contiguous."""
    folder = write_model(tmp_path / "model", "llama", num_key_value_heads=groups)
    plain = functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=rows))
    ours = functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=rows, like_gpu=True))
    submits = [Generate(number, prompt, 3 + number * 5 % 23) for number, prompt in enumerate(prompts())]
    again = [Generate(100 + submit.request_id, submit.prompt, submit.max_tokens) for submit in submits]
    with engine(plain) as driver:
        expected = driver.run(*submits)
    kernels.calls.clear()
    driver = Driver(ThreadLink("in place", ours, functools.partial(caching_scheduler, 10_000, None)))
    driver.start()
    try:
        assert driver.run(*submits) == expected, "cold"
        assert driver.run(*again) == expected, "warm"
    finally:
        driver.stop()
    assert "join_rows" in kernels.calls and decodes(kernels)


@pytest.mark.parametrize("family", some(["lfm2", "gemma3_text", "falcon_h1", "gemma4_text"], ["gemma4_text", "lfm2"]))
def test_layers_of_several_kinds(
    family: str, kernels: PointerKernels, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Kernels write where layers have full attention, MLX elsewhere. Prefixes and states of rows are saved as they
    end, and rows outgrow their class."""
    folder = write_rare(tmp_path / family, family) if family in RARE else tiny_model(family)
    settings = GenerationSettings("folder", folder, max_rows=3, disabled=frozenset({"slots"}))
    submits = [Generate(number, prompt, 3 + number * 7 % 12) for number, prompt in enumerate(prompts()[:12])]
    submits.append(Generate(50, tuple(place * 7 % VOCAB for place in range(250)), 12))
    again = [Generate(100 + submit.request_id, submit.prompt, submit.max_tokens) for submit in submits]
    with engine(functools.partial(MlxGenerationBackend, settings)) as driver:
        expected = driver.run(*submits)
    assert not kernels.calls, "--disable slots"
    ours = functools.partial(MlxGenerationBackend, dataclasses.replace(settings, disabled=frozenset()))
    driver = Driver(ThreadLink("in place", ours, functools.partial(caching_scheduler, 10_000, None)))
    driver.start()
    try:
        assert driver.run(*submits) == expected, "cold"
        assert driver.run(*again) == expected, "warm"
    finally:
        driver.stop()
    assert {"join_rows", "move_rows"} <= set(kernels.calls) and decodes(kernels)


def test_a_saved_prefix_shares_no_memory_with_a_slab(kernels: PointerKernels) -> None:
    """Even where the slab is hardly larger, so that MLX has no reason to copy it."""
    new = (mx.random.normal((1, 1, 250, 16)), mx.random.normal((1, 1, 250, 16)))
    caches = ClassCaches([new], powers_of_two, width=kernel_width, kernels=True)
    caches.join([JoiningRows([new], (0,))])
    saved = caches.save(0, SavePrefix(1, 0, 16, tuple(range(15)), None, 240), PrefixStore())
    mx.eval(saved)
    before = [np.array(array) for array in saved]
    for slab in caches.slabs:
        for part in slab.arrays:
            memory(part)[:] = 9
    for array, was in zip(saved, before, strict=True):
        np.testing.assert_array_equal(np.array(array), was)


def test_rows_outgrow_their_class(kernels: PointerKernels, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    submits = [
        Generate(0, (5, 6, 7), 300),
        *(Generate(1 + n, (n, 9), 20 + n) for n in range(12)),
        Generate(20, (1, 2), 280),
    ]
    answers = []
    for changes in ({}, {"like_gpu": True}):
        kernels.calls.clear()
        make = functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=4, **changes))
        with engine(make) as driver:
            answers.append(driver.run(*submits))
    assert answers[0] == answers[1]
    assert {"join_rows", "move_rows"} <= set(kernels.calls) and decodes(kernels)


def test_rows_move_when_memory_gets_tight(
    kernels: PointerKernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Slots stay vacant in most steps, and are freed in every fifth."""
    folder = write_model(tmp_path / "model", "llama")
    submits = [Generate(number, prompt, 3 + number * 7 % 31) for number, prompt in enumerate(prompts()[:24])]
    answers, steps = [], itertools.count()
    keep = ClassCaches.keep_vacant
    monkeypatch.setattr(ClassCaches, "keep_vacant", lambda caches, _: keep(caches, next(steps) % 5 > 0))
    for changes in ({}, {"like_gpu": True}):
        kernels.calls.clear()
        make = functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=16, **changes))
        with engine(make) as driver:
            answers.append(driver.run(*submits))
    assert answers[0] == answers[1]
    assert "move_rows" in kernels.calls and decodes(kernels)


def test_long_rows_are_computed_in_parts(kernels: PointerKernels, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama", max_position_embeddings=2000)
    long = tuple(place * 7 % VOCAB for place in range(1100))
    submits = [Generate(0, long, 6), Generate(1, (1, 2, 3), 9), Generate(2, long[3:600], 7)]
    answers = []
    for changes in ({}, {"like_gpu": True}):
        kernels.calls.clear()
        make = functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=4, **changes))
        with engine(make, prefill_tokens=2000) as driver:
            answers.append(driver.run(*submits))
    assert answers[0] == answers[1]
    assert kernels.calls["parted decode"] > 0


@pytest.mark.parametrize("lost", ["join_rows", "decode"])
def test_a_write_that_is_lost_is_found_at_load(
    lost: str, kernels: PointerKernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MLX gives a kernel a copy of an array that is not contiguous."""
    if lost == "join_rows":
        monkeypatch.setattr(kernel_slabs, "join_rows", lambda *_: [mx.array([1])])
    else:
        monkeypatch.setattr(attention, "slab_decode", lambda queries, *_, **__: mx.zeros_like(queries))
    folder = write_model(tmp_path / "model", "llama")
    make = functools.partial(
        MlxGenerationBackend,
        GenerationSettings("folder", folder, max_rows=4, like_gpu=True, disabled=frozenset({"fused-matmul"})),
    )
    driver = Driver(ThreadLink("lost", make, functools.partial(caching_scheduler, 10_000, None)))
    with pytest.raises(AssertionError, match="--disable kernel"):
        driver.start()
