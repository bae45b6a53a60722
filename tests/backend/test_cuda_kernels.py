"""Our CUDA kernels against plain formulas. Skipped where there is no CUDA."""

from __future__ import annotations

import mlx.core as mx
import pytest

from millstream.backend.device import current_device
from millstream.backend.generation.sampling.sampler import seeds, uniform
from millstream.backend.kernels import sample
from millstream.backend.kernels.decode_attention import ragged_attention
from millstream.backend.kernels.prefill_attention import prefill_attention
from millstream.backend.kernels.write_rows import write_rows
from support.sampling_grid import disagreements, grid, reference_tokens

pytestmark = pytest.mark.skipif(
    current_device().kind != "cuda",
    reason="compares CUDA kernels with formulas: needs MLX's CUDA build and an NVIDIA GPU",
)


def plain(queries: mx.array, keys: mx.array, values: mx.array, scale: float, seen: mx.array) -> mx.array:
    share = queries.shape[1] // keys.shape[1]
    k, v = (mx.repeat(each.astype(mx.float32), share, 1) for each in (keys, values))
    scores = queries.astype(mx.float32) @ k.swapaxes(-1, -2) * scale
    weights = mx.softmax(mx.where(seen, scores, -1e30), axis=-1) * seen
    return weights @ v


@pytest.mark.parametrize("size", [64, 96, 128])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 2)])
@pytest.mark.parametrize(("count", "length"), [(2, 2), (17, 17), (64, 64), (100, 300), (256, 1000), (64, 3000)])
@pytest.mark.parametrize("padded", [False, True])
def test_prefill(size: int, dtype: mx.Dtype, heads: int, groups: int, count: int, length: int, padded: bool) -> None:
    mx.random.seed(1)
    queries = mx.random.normal((3, heads, count, size)).astype(dtype)
    buffers = mx.random.normal((2, 3, groups, length + 37, size)).astype(dtype)
    keys, values = buffers[0][..., :length, :], buffers[1][..., :length, :]
    left = mx.array([0, min(7, length - 1), min(40, length - 1)], dtype=mx.int32)
    positions = mx.arange(length - count, length)[:, None]
    seen = (mx.arange(length) <= positions)[None, None]
    if padded:
        seen = seen & (mx.arange(length) >= left[:, None, None, None])
    out = prefill_attention(queries, keys, values, size**-0.5, left if padded else None)
    expected = plain(queries, keys, values, size**-0.5, seen)
    read = mx.any(seen, axis=-1, keepdims=True)
    assert mx.abs(mx.where(read, out.astype(mx.float32) - expected, 0)).max().item() < 0.02
    assert not mx.isnan(out).any().item()


@pytest.mark.parametrize("size", [64, 80])
@pytest.mark.parametrize("layout", ["as it is", "in a longer buffer", "turned round"])
def test_rows_are_placed(size: int, layout: str) -> None:
    mx.random.seed(1)
    part = mx.zeros((5, 2, 40, size), dtype=mx.bfloat16)  # not evaluated yet, as in a batch's first step
    rows = mx.random.normal((2, 2, 30, size)).astype(mx.bfloat16)
    if layout == "turned round":
        rows = mx.contiguous(rows.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    mx.eval(rows)
    expected = mx.zeros(part.shape, dtype=mx.bfloat16)
    length = 11 if layout == "in a longer buffer" else 30
    expected[mx.array([3, 0]), :, 7 : 7 + length] = rows[:, :, :length]
    mx.eval(expected)
    mx.eval(write_rows(part, rows[:, :, :length], [3, 0], 7))
    assert mx.array_equal(part, expected).item()


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 2)])
@pytest.mark.parametrize("columns", [300, 1500, 8200])
def test_decode(size: int, dtype: mx.Dtype, heads: int, groups: int, columns: int) -> None:
    """Rows of unequal length; two more rows than slots, whose answer is zero."""
    mx.random.seed(1)
    queries = mx.random.normal((5, heads, 1, size)).astype(dtype)
    keys, values = mx.random.normal((2, 3, groups, columns + 9, size)).astype(dtype)
    left = mx.array([0, columns - 3, columns // 2, columns - 1, columns - 1], dtype=mx.int32)
    end = mx.array([columns - 1], dtype=mx.int32)
    new = mx.random.normal((2, 5, groups, 1, size)).astype(dtype)
    mx.eval(queries, keys, values, new)
    out = ragged_attention(queries, keys, values, left, end, (new[0], new[1]), columns, size**-0.5)
    mx.eval(out)
    assert mx.array_equal(keys[:, :, columns - 1], new[0, :3, :, 0]).item()
    assert mx.array_equal(values[:, :, columns - 1], new[1, :3, :, 0]).item()
    places = mx.arange(columns + 9)[None, None, None]
    seen = (places >= left[:3, None, None, None]) & (places < columns)
    expected = plain(queries[:3], keys, values, size**-0.5, seen)
    assert mx.abs(out[:3].astype(mx.float32) - expected).max().item() < 0.02
    assert mx.abs(out[3:]).max().item() == 0


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_sampling_draws_what_the_reference_draws(dtype: mx.Dtype) -> None:
    """Every combination of temperature, top-k, top-p and min-p."""
    rows, logits, positions = grid()
    logits = logits.astype(dtype)
    drawn: list[int] = sample.sample(logits, sample.settings_of(rows), uniform(seeds(rows), positions)).tolist()
    assert disagreements(rows, drawn, reference_tokens(rows, logits, positions)) == []


def test_sampling_over_a_vocabulary_larger_than_a_block() -> None:
    """Only numbers that lie next to a border between two tokens may draw the other one."""
    rows, _, positions = grid()
    mx.random.seed(2)
    logits = mx.random.normal((len(rows), 50_000)) * 3
    drawn: list[int] = sample.sample(logits, sample.settings_of(rows), uniform(seeds(rows), positions)).tolist()
    expected = reference_tokens(rows, logits, positions)
    differing = sum(one != other for one, other in zip(drawn, expected, strict=True))
    assert differing <= len(rows) // 50
