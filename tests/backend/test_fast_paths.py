"""Each fast path against the plain computation that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_model

from millstream.backend.generation.caches.widths import eighths, exact, powers_of_two
from millstream.backend.generation.prefill.grouping import group_by_length
from millstream.backend.layers.cpu_linear import SMALL_BATCH, MklLinear, mkl_layer, mkl_matmul, swiglu, use_mkl_layout
from millstream.backend.layers.patch_layers import patch_function
from millstream.backend.layers.projections import fuse_projections
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Prefill
from support.tiers import examples


def close(got: mx.array, expected: mx.array, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.array(got), np.array(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 16, 48, 49, 100])
@pytest.mark.parametrize("shape", ["flat", "batched"])
def test_a_turned_product_is_the_product(rows: int, shape: str) -> None:
    x = mx.random.normal((rows, 1, 24) if shape == "batched" else (1, rows, 24))
    weight = mx.random.normal((40, 24))
    assert mkl_matmul(x, weight).shape == (*x.shape[:-1], 40)
    close(mkl_matmul(x, weight), x @ weight.T)


def test_quantised_layers_are_not_turned() -> None:
    layer = nn.QuantizedLinear(64, 32)
    assert mkl_layer(layer) is layer
    assert type(mkl_layer(nn.Linear(64, 32))) is MklLinear


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=50))
@settings(max_examples=examples(100), deadline=None)
def test_the_activation_is_the_activation(values: list[float]) -> None:
    gate = np.array(values, dtype=np.float32)
    exact_value = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    got = np.array(swiglu(mx.array(gate), mx.ones(gate.shape)))
    np.testing.assert_allclose(got, exact_value, rtol=2e-6, atol=1e-7)


class Pair(nn.Module):  # type: ignore[misc]
    """Calls its projections as models do; `apart` gives them different inputs."""

    def __init__(self, kind: str, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, size, bias=bias) for size in (32, 64, 96))
        self.gate_proj, self.up_proj = nn.Linear(64, 32, bias=bias), nn.Linear(64, 32, bias=bias)
        if kind == "quantised":
            nn.quantize(self, group_size=32, bits=4)

    def __call__(self, x: mx.array, apart: bool = False) -> list[mx.array]:
        y = x + 1 if apart else x
        return [self.v_proj(x), self.q_proj(y), self.k_proj(x), self.q_proj(x), self.gate_proj(y), self.up_proj(x)]


@pytest.mark.parametrize("kind", ["plain", "quantised"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_fused_projections_give_what_each_gives(kind: str, bias: bool, apart: bool) -> None:
    module = Pair(kind, bias)
    x = mx.random.normal((2, 3, 64))
    expected = module(x, apart)
    mx.eval(expected)
    assert fuse_projections(module) == 2
    for _ in range(2):
        for got, wanted in zip(module(x, apart), expected, strict=True):
            close(got, wanted)


def test_layers_that_differ_in_kind_stay_apart() -> None:
    module = Pair("plain", bias=False)
    module.k_proj = nn.QuantizedLinear(64, 64, bias=False)
    assert fuse_projections(module) == 1


def test_a_whole_model_computes_the_same_with_all_layers_exchanged(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(tiny_model("llama"))
    tokens = mx.array([[1, 2, 3, 4, 5, 6, 7]])
    expected = model(tokens)
    mx.eval(expected)
    fuse_projections(model, mkl_layer)
    use_mkl_layout(model)
    close(model(tokens), expected, 1e-4)


def test_exchanging_a_function_touches_no_other_model(tiny_model: Callable[[str], Path]) -> None:
    mine, _ = load_model(tiny_model("llama"))
    other, _ = load_model(tiny_model("llama"))
    calls: list[Any] = []

    def spy(queries: mx.array, *rest: Any, **named: Any) -> mx.array:
        calls.append(queries.shape)
        return queries

    assert patch_function(mine, "scaled_dot_product_attention", spy) == len(mine.layers)
    mx.eval(other(mx.array([[1, 2]])))
    assert calls == []
    mx.eval(mine(mx.array([[1, 2]])))
    assert len(calls) == len(mine.layers)


class OwnAttention(nn.Module):  # type: ignore[misc]
    """Has mlx-lm's name as an attribute of another module, as PLaMo 2 and some vision models do."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0)


def test_an_attribute_of_the_same_name_is_not_exchanged() -> None:
    layer = OwnAttention()
    assert patch_function(layer, "scaled_dot_product_attention", None) == 0
    assert patch_function(layer, "mx", mx, "scaled_dot_product_attention") == 1


def test_slot_policies() -> None:
    assert [exact(rows) for rows in (1, 3, 9)] == [1, 3, 9]
    assert [powers_of_two(rows) for rows in (1, 2, 3, 5, 64, 65)] == [1, 2, 4, 8, 64, 128]
    assert [eighths(rows) for rows in (1, 2, 3, 9, 17, 33, 64)] == [1, 2, 3, 9, 18, 36, 64]
    assert all(rows <= eighths(rows) <= rows * 9 / 8 for rows in range(1, 999))
    assert 1 not in SMALL_BATCH


@given(st.lists(st.integers(2, 300), max_size=20))
def test_groups_keep_everyone_and_bound_their_padding(lengths: list[int]) -> None:
    chunks = [Prefill(Generate(number, (0,) * length, 1), 0, length - 1) for number, length in enumerate(lengths)]
    groups = group_by_length(chunks, 0.5)
    assert sorted(c.request.request_id for group in groups for c in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [chunk.end for chunk in group]
        assert min(sizes) >= 0.5 * max(sizes)
