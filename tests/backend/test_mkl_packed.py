"""Weights that MKL has packed: the same numbers as the plain matmul, and only where there is memory for both."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from millstream.backend.layers import cpu_linear, mkl_packed
from millstream.backend.layers.cpu_linear import MklEmbedding, MklLinear, allow_packing, mkl_matmul, use_mkl_layout
from millstream.backend.layers.mkl_packed import PackedWeight, can_be_packed
from millstream.backend.layers.projections import fuse_projections

needs_mkl = pytest.mark.skipif(not mkl_packed.works(), reason="MKL is not loaded")


class Part(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(24, 40, bias=False)
        self.up_proj = nn.Linear(24, 40, bias=False)
        self.down_proj = nn.Linear(40, 24)


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 24)
        self.layers = [Part(), Part()]

    def __call__(self, ids: mx.array) -> mx.array:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer.down_proj(layer.gate_proj(x) * layer.up_proj(x))
        out: mx.array = self.embed.as_linear(x)
        return out


@pytest.fixture
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are packed, whether it pays or not."""
    monkeypatch.setattr(mkl_packed, "LEAST_SIZE", 1)
    monkeypatch.setattr(cpu_linear, "PAYS", float("inf"))


@needs_mkl
@pytest.mark.parametrize("rows", [4, 5, 16, 48])
def test_a_packed_product_is_the_product(rows: int) -> None:
    weight, packed = mx.random.normal((300, 130)), PackedWeight()
    for shape in ((rows, 1, 130), (1, rows, 130)):
        x = mx.random.normal(shape)
        got = mkl_matmul(x, weight, packed)
        assert got.shape == (*shape[:-1], 300)
        np.testing.assert_allclose(np.array(got), np.array(x @ weight.T), rtol=1e-4, atol=1e-4)
    turned = mx.random.normal((130, rows)).T  # not contiguous
    got = mkl_matmul(turned, weight, packed)
    np.testing.assert_allclose(np.array(got), np.array(turned @ weight.T), rtol=1e-4, atol=1e-4)


@needs_mkl
def test_a_model_computes_the_same_with_packed_layers(small_weights: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    ids = mx.arange(12).reshape(6, 2)
    expected = np.array(model(ids))
    fuse_projections(model, cpu_linear.mkl_layer)
    use_mkl_layout(model)
    assert allow_packing(model, 2**30) == 4 * (100 * 24 + 2 * (80 * 24 + 24 * 40))
    used: list[tuple[int, ...]] = []
    multiply = PackedWeight.multiply

    def counted(self: PackedWeight, x: mx.array, weight: mx.array) -> mx.array:
        used.append(weight.shape)
        return multiply(self, x, weight)

    monkeypatch.setattr(PackedWeight, "multiply", counted)
    np.testing.assert_allclose(np.array(model(ids)), expected, rtol=1e-3, atol=1e-4)
    assert used == [(80, 24), (24, 40)] * 2 + [(100, 24)]


def test_packing_needs_memory_for_both(small_weights: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "works", lambda: True)
    monkeypatch.setattr(cpu_linear, "_packing_pays", lambda weights: True)
    model = Model()
    use_mkl_layout(model)
    size = allow_packing(model, 2**30)
    assert size
    assert allow_packing(model, size * mkl_packed.SHARE_OF_MEMORY) == size
    assert allow_packing(model, size * mkl_packed.SHARE_OF_MEMORY - 1) == 0


@needs_mkl
def test_packing_must_pay(small_weights: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    use_mkl_layout(model)
    monkeypatch.setattr(cpu_linear, "PAYS", 0.0)
    assert allow_packing(model, 2**30) == 0
    assert model.embed._packed is None


def test_other_weights_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_be_packed(mx.zeros((100, 100)))
    assert can_be_packed(mx.zeros((1024, 1024)))
    assert not can_be_packed(mx.zeros((1024, 1024), dtype=mx.bfloat16))
    model = Model()
    use_mkl_layout(model)
    assert allow_packing(model, 2**40) == 0
    assert isinstance(model.embed, MklEmbedding)
    assert isinstance(model.layers[0].down_proj, MklLinear)
    assert model.embed._packed is None
