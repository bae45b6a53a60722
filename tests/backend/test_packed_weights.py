"""Packed weights: which ones the kernels take, their products, and models that keep them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from millstream.backend.device import Device, current_device
from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.kernels import (
    matmul_tilings,
    matmul_tuning,
    packed_bands,
    packed_tilings,
    small_matmul,
    unpack_weight,
)
from millstream.backend.kernels.weights import Packed
from millstream.backend.layers import matmul_reference, packed_choice, packed_products
from millstream.backend.layers.packed_linear import PackedEmbedding, PackedLinear, use_packed_products
from millstream.backend.weights.loading import unpack_weights
from millstream.backend.weights.unpacking import kernels_take, quantised_layers, within
from millstream.engine.generation.messages import Generate
from support.engines import engine
from support.quantised import write_quantised
from support.tiny import VOCAB

on_cuda = pytest.mark.skipif(
    current_device().kind != "cuda", reason="compiles CUDA kernels: needs MLX's CUDA build and an NVIDIA GPU"
)
FORMATS = [
    *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
    *(("affine", 4, size) for size in (32, 128)),
    *(("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)),
]
HERE = Device("cpu", "here", 2**34)


def packed(
    outputs: int, inputs: int, mode: str = "affine", bits: int = 4, group_size: int = 64, dtype: mx.Dtype = mx.bfloat16
) -> Packed:
    weight = (mx.random.normal((outputs, inputs)) * inputs**-0.5).astype(dtype)
    parts = mx.quantize(weight, group_size=group_size, bits=bits, mode=mode)
    return Packed(parts[0], parts[1], parts[2] if len(parts) > 2 else None, bits, group_size, mode)


def random(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    mx.random.seed(3)


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
def test_the_kernels_take_the_formats_of_mlx(mode: str, bits: int, group_size: int) -> None:
    assert packed_tilings.fits(packed(64, 1152, mode, bits, group_size))


def test_weights_that_the_kernels_cannot_take() -> None:
    assert not packed_tilings.fits(packed(64, 256, dtype=mx.float32)), "scales in float32"
    assert not packed_tilings.fits(packed(64, 96, bits=3, group_size=32)), "rows that are not whole 16 bytes"
    assert not packed_tilings.fits(packed(63, 256)), "an odd number of outputs"
    assert not packed_tilings.fits(dataclasses.replace(packed(64, 256), mode="another"))


@pytest.mark.parametrize("limit", [99, 227])
@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
def test_blocks_fit_the_device_and_cut_sums_in_the_same_way(
    mode: str, bits: int, group_size: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_tilings, "shared_limit", lambda: limit * 1024)
    plain = packed(64, 1152, mode, bits, group_size)
    for weight, head in itertools.product((plain, small_matmul.prepare(plain)), (0, 64, 80, 128, 192, 256)):
        assert isinstance(weight, Packed)
        for width in {matmul_tilings.width_of(rows, head) for rows in (1, 32, 64)}:
            tiling = packed_tilings.choose(weight, width, head=head)
            assert tiling.shared_bytes(width) <= limit * 1024 and tiling.threads <= 256
            assert not head or tiling.lines == head
            assert tiling.split == 1 or weight.tickets is not None
            # The slices are the source's own if there are many rows: one block has all, a pair, or one of them.
            assert tiling.split in (1, 4, 8) if tiling.many else tiling.split * tiling.along == matmul_tilings.SLICES


@pytest.mark.parametrize("size", [32, 64, 96, 128, 192, 256])
def test_tiles_are_whole_parts_of_heads(size: int) -> None:
    weight = small_matmul.prepare(packed(512, 256))
    assert isinstance(weight, Packed)
    for width in matmul_tilings.WIDTHS:
        assert size % packed_tilings.choose(weight, width, head=0, within=size).lines == 0


def test_few_tiles_are_shared_by_more_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_tilings, "multiprocessors", lambda: 100)
    for outputs, bands, split in ((128 * 90, 1, 1), (128 * 45, 2, 1), (128 * 45, 1, 4), (128 * 20, 1, 8), (128, 1, 8)):
        weight = small_matmul.prepare(packed(outputs, 128))
        assert isinstance(weight, Packed)
        assert packed_tilings.choose(weight, 64, bands, head=0).split == split


def test_heads_that_are_too_large_for_a_block() -> None:
    weight = small_matmul.prepare(packed(512, 256, bits=8))
    assert isinstance(weight, Packed)
    with pytest.raises(ValueError, match="too little room for heads of 512"):
        packed_tilings.choose(weight, 8, head=512)


@pytest.mark.parametrize("least", [1, 10**6], ids=["unpacked first", "by MLX"])
@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
@pytest.mark.parametrize("shape", [(3, 1), (1, 7), (2, 5)])
def test_products_are_those_of_the_unpacked_weight(
    mode: str, bits: int, group_size: int, shape: tuple[int, int], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = packed(34, 256, mode, bits, group_size, dtype=mx.float32)
    monkeypatch.setattr(packed_products, "_unpacked_from", {weight.form: least})
    x = random(*shape, 256, dtype=mx.float32)
    got = packed_products.product(x, weight)
    assert got.shape == (*shape, 34)
    assert mx.allclose(got, x @ packed_products.unpacked(weight, mx.float32).T, rtol=1e-4, atol=1e-4).item()


def test_layers_give_what_they_gave() -> None:
    linear = nn.QuantizedLinear(256, 64, bias=True)
    linear.bias = random(64, dtype=mx.float32)
    table = nn.QuantizedEmbedding(64, 256)
    odd = nn.QuantizedLinear(256, 63, bias=False)
    for layer in (linear, table, odd):
        layer.set_dtype(mx.float16)
    x, tokens = random(3, 1, 256, dtype=mx.float16), mx.array([[1, 5, 63]])
    expected = linear(x), table.as_linear(x), table(tokens), odd(x)
    assert use_packed_products([linear, table, odd, nn.Linear(4, 4)]) == 2
    assert type(linear) is PackedLinear and type(table) is PackedEmbedding and type(odd) is nn.QuantizedLinear
    for got, other in zip((linear(x), table.as_linear(x), table(tokens), odd(x)), expected, strict=True):
        assert mx.allclose(got.astype(mx.float32), other.astype(mx.float32), rtol=0.02, atol=0.02).item()


def test_it_is_measured_from_how_many_rows_on_weights_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {(512, "mlx"): 1.0, (512, "unpacking"): 2.0, (2048, "mlx"): 3.0, (2048, "unpacking"): 2.0}
    names = {packed_products._by_mlx: "mlx", packed_products._by_unpacking: "unpacking"}
    monkeypatch.setattr(packed_products, "_seconds", lambda by, x, weight: costs[x.shape[0], names[by]])
    found: dict[Any, int] = {}
    monkeypatch.setattr(packed_products, "_unpacked_from", found)
    model = nn.Sequential(nn.QuantizedLinear(256, 64), nn.QuantizedLinear(256, 32), nn.QuantizedEmbedding(999, 128))
    packed_products.measure_packed_products(model)
    assert list(found.values()) == [513]
    costs[512, "unpacking"] = 1.0
    found.clear()
    packed_products.measure_packed_products(model)
    assert list(found.values()) == [packed_products.KERNEL_ROWS + 1]


def test_it_is_measured_up_to_how_many_rows_the_kernels_are_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, costs = packed(64, 256), {128: 1.0, 256: 1.9, 512: 3.9}
    monkeypatch.setattr(packed_products, "_kernels_take", lambda dtype, weight: True)
    monkeypatch.setattr(
        packed_products,
        "_seconds",
        lambda by, x, weight: costs[x.shape[0]] if by is packed_products._by_kernel else 2.0,
    )
    assert packed_products._rows_for_kernels(weight) == 256
    costs[128] = 2.1
    assert packed_products._rows_for_kernels(weight) == packed_products.KERNEL_ROWS


def test_rows_beyond_what_kernels_are_best_for_take_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed(64, 256)
    monkeypatch.setattr(packed_products, "_kernels_take", lambda dtype, weight: True)
    monkeypatch.setattr(packed_products, "_kernel_rows", {})
    for name in ("_by_kernel", "_by_unpacking"):
        monkeypatch.setattr(packed_products, name, lambda x, weight, name=name: mx.full((len(x), 64), len(name)))
    by_kernel, by_unpacking = len("_by_kernel"), len("_by_unpacking")
    for most in (None, 128):
        if most is not None:
            packed_products._kernel_rows[matmul_tuning.size_of(weight)] = most
        for rows, expected in ((64, by_kernel), (65, by_kernel if most else by_unpacking), (129, by_unpacking)):
            assert packed_products.product(random(1, rows, 256), weight)[0, 0, 0].item() == expected
    with matmul_tuning.as_step_of(8):  # a pass has the numbers of the step that it stands for
        assert packed_products.product(random(1, 129, 256), weight)[0, 0, 0].item() == by_kernel


class Mixed(nn.Module):
    """Layers that the kernels take, and one that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.QuantizedEmbedding(96, 256)
        self.language = nn.Sequential(nn.QuantizedLinear(256, 64, bias=False), nn.QuantizedLinear(64, 33))
        self.tower = nn.QuantizedLinear(256, 64)
        self.norm = nn.RMSNorm(10)
        self.set_dtype(mx.float16)


def test_only_layers_that_the_kernels_do_not_take_are_unpacked() -> None:
    model = Mixed()
    names = [name for name, _ in quantised_layers(model)]
    odd = model.language.layers[1]
    expected, bias = odd(mx.ones((1, 64), dtype=mx.float16)), odd.bias
    notes = unpack_weights(model, HERE, mx.bfloat16, kernels_take)
    assert notes == ["weights of 3 layers stay packed", "weights of 1 layers unpacked to bfloat16"]
    left = [name for name, _ in quantised_layers(model)]
    assert set(names) - set(left) == {"language.layers.1"}
    plain = model.language.layers[1]
    assert type(plain) is nn.Linear and plain.weight.dtype == mx.float16, "the type is the packed layers'"
    assert mx.array_equal(plain.bias, bias).item()
    assert mx.allclose(plain(mx.ones((1, 64), dtype=mx.float16)), expected, rtol=0.02, atol=0.02).item()
    assert all(value.dtype != mx.bfloat16 for _, value in tree_flatten(model.parameters()))


def test_layers_outside_of_the_language_part_are_unpacked() -> None:
    model = Mixed()
    notes = unpack_weights(model, HERE, mx.bfloat16, within("language", kernels_take))
    assert notes[0] == "weights of 1 layers stay packed"
    assert [name for name, _ in quantised_layers(model)] == ["language.layers.0"]


def test_nothing_is_unpacked_where_memory_is_short() -> None:
    model = Mixed()
    notes = unpack_weights(model, Device("metal", "small", 2**10), mx.bfloat16, kernels_take)
    assert notes[0] == "weights of 3 layers stay packed" and notes[1].startswith("weights not unpacked: bfloat16 would")
    assert len(quantised_layers(model)) == 4


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_a_changing_batch_of_a_packed_model_equals_single_requests(family: str, tmp_path: Path) -> None:
    folder = write_quantised(tmp_path / family, family)
    model, _ = load_model(folder)
    rows = [
        (tuple((7 * row + 11 * at) % VOCAB for at in range(1 + 9 * row % 40)), 3 + 5 * row % 17) for row in range(9)
    ]
    expected = [
        [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)] for prompt, count in rows
    ]
    settings = GenerationSettings("folder", folder, max_rows=4, unpack=False, like_gpu=True)
    with engine(lambda: MlxGenerationBackend(settings), prefill_tokens=40) as driver:
        assert driver.facts is not None and driver.facts.dtype == "4-bit"
        (note,) = [note for note in driver.facts.notes if note.startswith("fast paths: ")]
        # Packed weights of this type are MLX's own business on CUDA.
        assert current_device().kind == "cuda" or "packed-matmul" in note.partition(";")[0]
        assert driver.run(*(Generate(at, prompt, count) for at, (prompt, count) in enumerate(rows))) == expected


@on_cuda
@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
def test_the_kernels_multiply_with_every_format(mode: str, bits: int, group_size: int) -> None:
    weight, x = packed(98, 1152, mode, bits, group_size), random(5, 1, 1152)
    expected = x.astype(mx.float32) @ packed_products.unpacked(weight, mx.bfloat16).astype(mx.float32).T
    got = small_matmul.matmul(x, weight).astype(mx.float32)
    assert mx.abs(got - expected).max().item() <= 0.01 * mx.abs(expected).max().item()


@on_cuda
def test_rows_of_a_packed_weight_get_the_same_numbers_in_any_company() -> None:
    weight, x = small_matmul.prepare(packed(256, 1088)), random(64, 1, 1088)
    for step, widths in ((5, (5, 8, 16, 32, 33, 64)), (20, (20, 32, 33, 64))):
        with matmul_tuning.as_step_of(step):
            found = []
            for rows in widths:
                found.append(small_matmul.matmul(x[:rows], weight)[:5])
                mx.eval(found[-1])  # a weight's counters are of one launch at a time
        assert all(mx.array_equal(each, found[0]).item() for each in found), step
    residual = random(64, 1, 256)
    expected = matmul_reference.matmul_add(x, weight, residual)
    got = small_matmul.matmul_add(x, weight, residual)
    assert mx.abs((got - expected).astype(mx.float32)).max().item() <= 0.05


@on_cuda
@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
def test_groups_of_warps_give_the_numbers_of_the_unpacked_weight(
    mode: str, bits: int, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not matmul_tilings.has_warpgroups():
        pytest.skip("multiplies in groups of warps: needs sm_90")
    monkeypatch.setattr(matmul_tuning, "_groups", {})
    weight, x = small_matmul.prepare(packed(322, 1152, mode, bits, group_size)), random(64, 1, 1152)
    assert isinstance(weight, Packed)
    for width in (32, 64):
        matmul_tuning.decide_groups(matmul_tuning.size_of(weight), width, True)
        assert packed_choice.agrees(("matmul", 322, 1152, width), weight)
    full = small_matmul.matmul(x, weight)
    for rows in (9, 32, 33):
        mx.eval(full)  # a weight's counters are of one launch at a time
        assert mx.array_equal(small_matmul.matmul(x[:rows], weight), full[:rows]).item(), rows


@on_cuda
@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
def test_a_weight_is_unpacked_as_mlx_does(mode: str, bits: int, group_size: int) -> None:
    weight = packed(98, 1152, mode, bits, group_size)
    got = unpack_weight.unpack(weight, mx.bfloat16).astype(mx.float32)
    expected = mx.dequantize(weight.packed, weight.scales, weight.biases, group_size, bits, mode).astype(mx.float32)
    assert mx.abs(got - expected).max().item() <= 0.01 * mx.abs(expected).max().item()


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
@pytest.mark.parametrize("memory", [99 * 1024, 227 * 1024])
def test_bands_fit_the_device_and_cut_sums_in_the_same_way(
    mode: str, bits: int, group_size: int, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_bands, "shared_limit", lambda: memory)
    weight = small_matmul.prepare(packed(64, 1152, mode, bits, group_size))
    assert isinstance(weight, Packed)
    for head, part in ((0, 0), (0, 64), (0, 96), (64, 0), (128, 0)):
        tiling = packed_bands.in_bands(weight, packed_bands.MAX_WIDTH, head=head, within=part)
        assert tiling is not None and tiling.threads <= 256 and tiling.split * tiling.along == matmul_tilings.SLICES
        assert tiling.lines == head if head else part % tiling.lines == 0
        assert tiling.shared_bytes(packed_bands.MAX_WIDTH) <= memory


def test_a_pass_takes_the_body_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, taken = packed(64, 256), []
    monkeypatch.setattr(small_matmul, "run", lambda kind, tiling, *rest: taken.append(tiling.body) or [mx.zeros(1)])
    for step, rows in ((None, 1), (None, 8), (None, 9), (None, 64), (8, 9), (8, 64), (9, 64)):
        with contextlib.nullcontext() if step is None else matmul_tuning.as_step_of(step):
            small_matmul.matmul(random(rows, 1, 256), weight)
    assert taken == ["walking", "walking", "bands", "bands", "many rows", "many rows", "bands"]
