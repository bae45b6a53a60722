"""Chunks of one prompt, read into caches of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from millstream.backend.device import current_device
from millstream.backend.generation.caches.batch_caches import states
from millstream.backend.generation.caches.widths import CHUNKS, PADDED, chunk_length
from millstream.backend.generation.prefill.prefiller import SinglePrefiller
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.weights.loading import load
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill


def test_states_are_in_the_order_of_the_layers() -> None:
    """What is evaluated in parts is evaluated from the first layer on: the last one would bring all others with it."""
    first, second, third = KVCache(), CacheList(ArraysCache(2), KVCache()), KVCache()
    numbers = iter(range(1, 9))
    for cache in (first, second.caches[1], third):
        cache.update_and_fetch(mx.full((1, 1, 1, 1), next(numbers)), mx.full((1, 1, 1, 1), next(numbers)))
    second.caches[0][0], second.caches[0][1] = mx.array([7]), mx.array([8])
    assert [int(array.reshape(-1)[0].item()) for array in states([first, second, third])] == [1, 2, 7, 8, 3, 4, 5, 6]


@pytest.mark.parametrize(("tokens", "read"), [(1, 64), (64, 64), (65, 128), (300, 512), (512, 512), (513, 513)])
def test_short_chunks_have_a_usual_length(tokens: int, read: int) -> None:
    assert chunk_length(tokens) == read
    assert read in CHUNKS or read > PADDED


@pytest.mark.parametrize("cuts", [(0, 40), (0, 64, 100), (0, 5, 6, 70, 130)])
def test_padding_changes_nothing_that_is_read(tiny_model: Callable[[str], Path], cuts: tuple[int, ...]) -> None:
    model = load("folder", tiny_model("llama"), current_device(), unpack=False).model
    submit = Generate(1, tuple(place % 50 + 1 for place in range(cuts[-1] + 1)), 1)

    def read(*, padded: bool) -> list[mx.array]:
        reader = SinglePrefiller(model, PrefixStore(), padded=padded)
        for start, end in itertools.pairwise(cuts):
            mx.eval(reader.read([Prefill(submit, start, end)]))
        _, [caches] = reader.take([1])
        assert {cache.offset for cache in caches} == {cuts[-1]}
        return [part for cache in caches for part in cache.keys_and_values()]

    for plain, padded in zip(read(padded=False), read(padded=True), strict=True):
        assert plain.shape == padded.shape
        assert mx.allclose(plain, padded, rtol=1e-4, atol=1e-5)
