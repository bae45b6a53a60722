"""Prefill of one prompt, chunk by chunk, into caches of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from millstream.backend.device import current_device
from millstream.backend.generation.caches.batch_caches import cache_arrays
from millstream.backend.generation.caches.widths import CHUNK_LENGTHS, MAX_PADDED_CHUNK, padded_chunk_length
from millstream.backend.generation.prefill.prefiller import SinglePrefiller
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.weights.loading import load
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill


def test_cache_arrays_are_in_layer_order() -> None:
    """Deferred chunks are evaluated from the first layer on: the last layer would evaluate all others with it."""
    first, second, third = KVCache(), CacheList(ArraysCache(2), KVCache()), KVCache()
    numbers = iter(range(1, 9))
    for cache in (first, second.caches[1], third):
        cache.update_and_fetch(mx.full((1, 1, 1, 1), next(numbers)), mx.full((1, 1, 1, 1), next(numbers)))
    second.caches[0][0], second.caches[0][1] = mx.array([7]), mx.array([8])
    assert [int(array.reshape(-1)[0].item()) for array in cache_arrays([first, second, third])] == [
        1,
        2,
        7,
        8,
        3,
        4,
        5,
        6,
    ]


@pytest.mark.parametrize(("tokens", "padded"), [(1, 64), (64, 64), (65, 128), (300, 512), (512, 512), (513, 513)])
def test_short_chunks_are_padded_to_a_usual_length(tokens: int, padded: int) -> None:
    assert padded_chunk_length(tokens) == padded
    assert padded in CHUNK_LENGTHS or padded > MAX_PADDED_CHUNK


@pytest.mark.parametrize("cuts", [(0, 40), (0, 64, 100), (0, 5, 6, 70, 130)])
def test_padding_does_not_change_the_kv_cache(tiny_model: Callable[[str], Path], cuts: tuple[int, ...]) -> None:
    model = load("folder", tiny_model("llama"), current_device(), unpack=False).model
    submit = Generate(1, tuple(index % 50 + 1 for index in range(cuts[-1] + 1)), 1)

    def prefill(*, padded: bool) -> list[mx.array]:
        prefiller = SinglePrefiller(model, PrefixStore(), pad_chunks=padded)
        for start, end in itertools.pairwise(cuts):
            mx.eval(prefiller.prefill([Prefill(submit, start, end)]))
        _, [caches] = prefiller.take([1])
        assert {cache.offset for cache in caches} == {cuts[-1]}
        return [part for cache in caches for part in cache.keys_and_values()]

    for plain, padded in zip(prefill(padded=False), prefill(padded=True), strict=True):
        assert plain.shape == padded.shape
        assert mx.allclose(plain, padded, rtol=1e-4, atol=1e-5)
