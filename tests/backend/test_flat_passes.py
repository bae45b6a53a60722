"""Whole prompts that share a flat pass: each has the keys and values that it has alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, RotatingKVCache
from mlx_lm.utils import load_model

from millstream.backend.generation.caches.batch_caches import new_row_caches
from millstream.backend.generation.caches.flat_caches import FlatCache, FlatPrompts, FlatStates, fits_flat_pass
from millstream.backend.generation.caches.joining import JoiningRows, layer_window
from millstream.backend.generation.caches.quantized import KvQuantization
from millstream.backend.generation.caches.widths import flat_length, padded_group
from millstream.backend.generation.layers.attention import adopt_attention, attention
from millstream.backend.generation.layers.state_layers import adopt_state_layers
from millstream.backend.generation.prefill.flat import FlatPasses
from millstream.backend.generation.prefill.groups import FlatMixedGroup
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.prefix_store.cache_state import kv_parts
from millstream.engine.generation.messages import Generate
from millstream.engine.prefix_cache.orders import SavePrefix
from support.tiny import VOCAB, write_model

PROMPTS = [tuple((seed * 11 + index * 7) % VOCAB for index in range(length)) for seed, length in enumerate((30, 1, 21))]


def opened(folder: Path) -> Any:
    model, _ = load_model(folder)
    assert adopt_state_layers(model) is None
    adopt_attention(model, attention)
    return model


def windows_of(model: Any) -> list[int | None]:
    return [layer_window(cache) for cache in new_row_caches(model)]


def alone(model: Any, prompt: tuple[int, ...]) -> list[Any]:
    caches = new_row_caches(model)
    model(mx.array([prompt]), cache=caches)
    return caches


def close(one: mx.array, other: mx.array) -> bool:
    return one.shape == other.shape and mx.allclose(one, other, rtol=1e-4, atol=1e-5).item() is True


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma3_text"])
def test_each_prompt_has_what_it_has_alone(family: str, tiny_model: Callable[[str], Path]) -> None:
    """The second half of the layers sees what the first half has attended to."""
    model = opened(tiny_model(family))
    parts, places = FlatPasses(model, windows_of(model), compiled=False).run(PROMPTS)
    assert places == ((0, 30), (30, 1), (31, 21))
    assert {part.shape[2] for layer in parts for part in layer} == {64}
    for prompt, (first, length) in zip(PROMPTS, places, strict=True):
        for cache, layer in zip(alone(model, prompt), parts, strict=True):
            kept = min(length, cache.keys.shape[2])
            for part, expected in zip(layer, (cache.keys, cache.values), strict=True):
                rotated = isinstance(cache, RotatingKVCache)
                ordered = cache._temporal_order(expected) if rotated else expected[:, :, :length]
                mine = part[:, :, first + length - min(kept, ordered.shape[2]) : first + length]
                assert close(mine, ordered[:, :, -mine.shape[2] :])


def test_packed_keys_and_values_are_those_of_a_prompt_alone(tmp_path: Path) -> None:
    model = opened(write_model(tmp_path / "model", "llama", hidden_size=128, head_dim=64))
    packing = KvQuantization(8, 32)
    parts, places = FlatPasses(model, windows_of(model), packing, compiled=False).run(PROMPTS)
    first, length = places[2]
    keys = alone(model, PROMPTS[2])[0].keys[:, :, :length]
    expected = mx.quantize(keys, group_size=packing.group_size, bits=8)
    for part, packed in zip(parts[0][:3], expected, strict=True):
        assert mx.array_equal(part[:, :, first : first + length], packed).item(), (
            "the first layer reads embeddings alone"
        )


def test_a_saved_window_is_that_of_a_prompt_alone(tiny_model: Callable[[str], Path]) -> None:
    model = opened(tiny_model("gemma3_text"))
    submits = [Generate(number, (*prompt, 1), 1) for number, prompt in enumerate(PROMPTS)]
    group = FlatMixedGroup(FlatPasses(model, windows_of(model), compiled=False), submits)
    store = PrefixStore()
    order = SavePrefix(2, 0, 8, (1, 2), 9, 21)
    saved = group.save(order, store)
    assert saved
    mx.eval(saved)
    filled = new_row_caches(model)
    store.fill_caches((1, 2), 9, filled)
    for cache, expected in zip(filled, alone(model, PROMPTS[2]), strict=True):
        assert cache.offset == 21
        for part, other in zip(kv_parts(cache), kv_parts(expected), strict=True):
            count = min(part.shape[2], other.shape[2])
            assert close(part[:, :, -count:], other[:, :, -count:])
    assert group.save(SavePrefix(2, 0, 8, (3,), 8, 20), store) is None, "no row is at that token"


def test_a_layer_with_another_window_is_refused() -> None:
    cache = FlatCache(FlatPrompts(mx.zeros((4,), dtype=mx.int32), mx.zeros((4,), dtype=mx.int32)), window=8)
    cache.make_mask(1, window_size=8)
    with pytest.raises(ValueError, match="do not attend"):
        cache.make_mask(1, window_size=16)
    cache.update_and_fetch(mx.zeros((4, 1, 1, 2)), mx.zeros((4, 1, 1, 2)))
    with pytest.raises(ValueError, match="one pass"):
        cache.update_and_fetch(mx.zeros((4, 1, 1, 2)), mx.zeros((4, 1, 1, 2)))


@pytest.mark.parametrize("compiled", [False, True])
def test_states_of_short_convolutions_are_those_of_a_prompt_alone(
    compiled: bool, tiny_model: Callable[[str], Path]
) -> None:
    """The prompt of one token is shorter than its state."""
    model = opened(tiny_model("lfm2"))
    submits = [Generate(number, (*prompt, 1), 1) for number, prompt in enumerate(PROMPTS)]
    group = FlatMixedGroup(FlatPasses(model, windows_of(model), compiled=compiled), submits)
    store = PrefixStore()
    for number, prompt in enumerate(PROMPTS):
        expected = alone(model, prompt)
        members, rows = group.take({number})
        assert [member.request_id for member in members] == [number] and rows.count == 1
        states = [cache[0] for cache in expected if isinstance(cache, ArraysCache)]
        assert len(states) == len(rows.states) > 0
        assert all(close(mine, other) for (mine,), other in zip(rows.states, states, strict=True))
        (attending,) = rows.attending.values()
        keys = [kv_parts(cache)[0] for cache in expected if not isinstance(cache, ArraysCache)]
        stop = attending.source(0).stop
        for parts, other in zip(attending.layers, keys, strict=True):
            assert close(parts[0][:, :, stop - len(prompt) : stop], other[:, :, : len(prompt)])
        mx.eval(group.save(SavePrefix(number, 0, 8, (), 9 + number, len(prompt)), store) or [])
        filled = new_row_caches(model)
        store.fill_caches((), 9 + number, filled)
        saved = [cache[0] for cache in filled if isinstance(cache, ArraysCache)]
        assert all(close(mine, other) for mine, other in zip(saved, states, strict=True))


def test_other_states_are_refused(tiny_model: Callable[[str], Path]) -> None:
    """By their number, or when a module reads them that is no short convolution."""
    caches = {
        name: new_row_caches(load_model(tiny_model(name))[0]) for name in ("llama", "gemma3_text", "lfm2", "mamba2")
    }
    fitting = {name: all(map(fits_flat_pass, each)) for name, each in caches.items()}
    assert fitting == {"llama": True, "gemma3_text": True, "lfm2": True, "mamba2": False}
    model = opened(tiny_model("mamba2"))
    with pytest.raises(ValueError, match="short convolution"):
        FlatPasses(model, windows_of(model), compiled=False).run(PROMPTS)
    states = FlatStates(FlatPrompts(mx.zeros((4,), dtype=mx.int32), mx.zeros((4,), dtype=mx.int32)))
    with pytest.raises(ValueError, match="no short convolution"):
        assert states.parts
    states.write(mx.zeros((6, 2)))
    with pytest.raises(ValueError, match="one pass"):
        states.write(mx.zeros((6, 2)))
    with pytest.raises(TypeError):
        states[0]  # type: ignore[index]


def test_some_of_the_rows_are_taken_without_a_copy() -> None:
    layers = [(mx.zeros((1, 2, 64, 4)), mx.zeros((1, 2, 64, 4)))]
    rows = JoiningRows(layers, (), flat=((0, 30), (30, 1), (31, 21)))
    assert rows.lengths == (30, 1, 21) and rows.count == 3
    some = rows.take([0, 2])
    assert some.layers is layers and some.lengths == (30, 21)
    assert some.source(1) == (0, 52)


def test_lengths_and_rows_of_passes_are_few() -> None:
    lengths = [flat_length(tokens) for tokens in range(1, 4097)]
    assert all(length >= tokens for tokens, length in enumerate(lengths, start=1))
    assert all(length <= 1.125 * tokens for tokens, length in enumerate(lengths, start=1) if tokens >= 1024)
    assert len(set(lengths)) < 30
    rows = [padded_group(prompts) for prompts in range(1, 65)]
    assert all(prompts <= padded < 1.5 * prompts for prompts, padded in enumerate(rows, start=1))
    assert sorted(set(rows)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
