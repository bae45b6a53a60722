"""Passes in parts: the same numbers as a pass at once, layers built in order, and models that cannot have them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache

from millstream.backend.device import current_device
from millstream.backend.generation.caches.batch_caches import cache_arrays
from millstream.backend.generation.caches.quantized import new_prompt_caches
from millstream.backend.generation.prefill.pass_in_parts import LayersInParts, layers_in_parts
from millstream.backend.weights.loading import load
from millstream.backend.weights.materialize import evaluate_all
from support.tiny import VOCAB

FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "lfm2", "mamba2", "falcon_h1")


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_can_have_them(family: str, tiny_model: Callable[[str], Path]) -> None:
    def found() -> bool:
        model = load("folder", tiny_model(family), current_device(), unpack=True).model
        evaluate_all(model)
        return layers_in_parts(model, VOCAB, lambda: new_prompt_caches(model, None)) is not None

    with ThreadPoolExecutor(1) as owner:
        assert owner.submit(found).result()


class Layer(nn.Module):  # type: ignore[misc]
    """A layer that keeps its input in its cache."""

    def __init__(self, number: int, calls: list[int]) -> None:
        super().__init__()
        self._number, self._calls = number, calls
        self.kind = "plain"

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        self._calls.append(self._number)
        cache.update_and_fetch(x[:, None], x[:, None])
        return x + self._number


class Model(nn.Module):  # type: ignore[misc]
    """`between`: what is done to the output of a layer before the next one reads it."""

    def __init__(self, count: int = 5, between: Callable[[Any], Any] = lambda out: out) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.layers = [Layer(number, self.calls) for number in range(count)]
        self._between = between

    def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:
        h = mx.broadcast_to(tokens[..., None].astype(mx.float32), (*tokens.shape, 4))
        for layer, each in zip(self.layers, cache, strict=True):
            assert layer.kind == "plain", "a stand-in has the attributes of its layer"
            h = self._between(layer(h, None, cache=each))
        return h


def caches(count: int = 5) -> list[KVCache]:
    return [KVCache() for _ in range(count)]


TOKENS = mx.arange(7, dtype=mx.int32)[None]


def test_each_part_builds_its_layers() -> None:
    model, own, ends = Model(), caches(), [0]

    def end() -> None:
        ends[0] += 1

    begun = LayersInParts(model).begin(TOKENS, own, end)
    assert model.calls == [] and [type(layer) for layer in model.layers] == [Layer] * 5
    parts = begun.split(3)
    arrays = parts[0]()
    assert len(parts) == 3 and model.calls == [0, 1] and len(arrays) == 4 and ends == [0]
    assert len(parts[1]()) == 2 and model.calls == [0, 1, 2]
    begun.build_rest()
    assert model.calls == [0, 1, 2, 3, 4] and ends == [1]
    assert len(parts[2]()) == 4 and model.calls == [0, 1, 2, 3, 4] and ends == [1]
    whole = caches()
    Model()(TOKENS, whole)
    for expected, found in zip(cache_arrays(whole), cache_arrays(own), strict=True):
        assert mx.array_equal(expected, found).item()


def test_it_has_no_more_parts_than_layers() -> None:
    model = Model()
    parts = LayersInParts(model).begin(TOKENS, caches()).split(9)
    assert [len(part()) for part in parts] == [2] * 5 and model.calls == [0, 1, 2, 3, 4]


def test_the_step_that_begins_a_pass_may_build_fewer_layers() -> None:
    model = Model(20)
    parts = LayersInParts(model).begin(TOKENS, caches(20)).split(5, 0.5)
    assert [len(part()) // 2 for part in parts] == [2, 5, 4, 5, 4] and model.calls == list(range(20))
    assert len(LayersInParts(Model(2)).begin(TOKENS, caches(2)).split(5, 0.5)) == 2


def test_what_nobody_wants_is_not_built() -> None:
    model = Model()
    begun = LayersInParts(model).begin(TOKENS, caches())
    first, second = begun.split(2)
    first()
    begun.cancel()
    begun.build_rest()
    assert second() == [] and model.calls == [0, 1]


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (lambda out: out * 2, "it computes between its layers"),
        (lambda out: out[:, :, :2], "it computes between its layers"),
    ],
)
def test_a_model_that_computes_between_its_layers_cannot(
    between: Callable[[Any], Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    assert layers_in_parts(Model(between=between), 50, caches) is None
    assert why in caplog.text


def test_nor_can_one_that_leaves_layers_out_or_keeps_them_twice(caplog: pytest.LogCaptureFixture) -> None:
    class Halved(Model):
        def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:
            h = tokens[..., None].astype(mx.float32)
            for layer, each in zip(self.layers[:2], cache, strict=False):
                h = layer(h, None, cache=each)
            return h

    caplog.set_level("DEBUG")
    assert layers_in_parts(Halved(), 50, lambda: caches(2)) is None and "each layer once" in caplog.text
    twice = Model()
    twice.others = list(twice.layers)
    assert layers_in_parts(twice, 50, caches) is None and "not in one list" in caplog.text


def test_numbers_that_differ_are_found(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.layers[1] = _Moody(1, model.calls)
    caplog.set_level("DEBUG")
    assert layers_in_parts(model, 50, caches) is None and "numbers differ" in caplog.text


class _Moody(Layer):
    """Gives other numbers each time."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        self._calls.append(self._number)
        self.times = getattr(self, "times", 0) + 1
        cache.update_and_fetch(x[:, None] + self.times, x[:, None])
        return x
