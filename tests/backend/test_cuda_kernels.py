"""Our CUDA kernels against plain formulas. Skipped where there is no CUDA."""

from __future__ import annotations

import mlx.core as mx
import pytest

from millstream.backend.device import current_device
from millstream.backend.generation.sampling.sampler import seeds
from millstream.backend.kernels import sample
from millstream.backend.kernels.decode_attention import DecodeWork, slab_decode
from millstream.backend.kernels.prefill_attention import prefill_attention
from millstream.backend.kernels.write_rows import addresses_of, move_rows, write_rows
from millstream.types import Sampling
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
    length = 11 if layout == "in a longer buffer" else 30
    expected = mx.zeros(part.shape, dtype=mx.bfloat16)
    expected[3, :, : length - 4] = rows[0, :, 4:length]
    expected[0, :, :length] = rows[1, :, :length]
    expected[1, :, 35:] = rows[1, :, :5]
    expected[1, :, : length - 5] = rows[1, :, 5:length]
    mx.eval(expected)
    places = mx.array([[3, 4, length - 4, 0], [0, 0, length, 0]], dtype=mx.int32)
    mx.eval(write_rows(part, rows[:, :, :length], places))
    mx.eval(write_rows(part, rows[1:, :, :length], mx.array([[1, 0, length, 35]], dtype=mx.int32)))  # a ring
    assert mx.array_equal(part, expected).item()


@pytest.mark.parametrize("size", [64, 81])
def test_rows_are_moved_in_all_layers(size: int) -> None:
    mx.random.seed(1)
    sizes = [size, 2, size, size, 1, 16]
    source = [mx.random.normal((2, 3, 40, each)).astype(mx.bfloat16) for each in sizes]
    target = [mx.zeros((3, 3, 60, each), dtype=mx.bfloat16) for each in sizes]
    mx.eval(source, target)
    expected = []
    for old, new in zip(source, target, strict=True):
        moved = new * 1
        moved[2, :, :33] = old[1, :, :33]
        moved[0, :, :5] = old[0, :, :5]
        expected.append(moved)
    mx.eval(expected)
    table = mx.stack([addresses_of(source), addresses_of(target)]).reshape(2, 3, 2)
    mx.eval(move_rows([(0, 1, 40, 1, 2, 60, 33, 0), (0, 0, 40, 1, 0, 60, 5, 0)], table, source))
    assert all(mx.array_equal(one, other).item() for one, other in zip(target, expected, strict=True))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 2)])
@pytest.mark.parametrize("tokens", [300, 1500, 8200])
def test_decode(size: int, dtype: mx.Dtype, heads: int, groups: int, tokens: int) -> None:
    """Rows of unequal length in two slabs, one of which reads shared tokens; and a row without tokens."""
    mx.random.seed(1)
    parted, layers, layer = tokens > 1024, 2, 1
    queries = mx.random.normal((4, heads, 1, size)).astype(dtype)
    new = mx.random.normal((2, 4, groups, 1, size)).astype(dtype)
    shapes = [(2, groups, tokens + 9, size), (1, groups, 256, size), (1, groups, 700, size)]
    slabs = [[mx.random.normal(shape).astype(dtype) for _ in range(2 * layers)] for shape in shapes]
    mx.eval(queries, new, slabs)
    lengths = [tokens - 1, 250, 40 + (600 if parted else 0), 0]
    keys, values = ([slab[2 * layer + part] * 1 for slab in slabs] for part in (0, 1))
    expected = []
    for row, (slab, slot) in enumerate([(0, 1), (1, 0), (0, 0)]):
        shared = 600 if parted and row == 2 else 0
        end = lengths[row] - shared
        both = []
        for part, fresh in ((keys, new[0]), (values, new[1])):
            own = mx.concatenate([part[slab][slot : slot + 1, :, :end], fresh[row : row + 1]], axis=2)
            both.append(mx.concatenate([part[2][:, :, 50:650], own], axis=2) if shared else own)
        expected.append(plain(queries[row : row + 1], *both, size**-0.5, mx.ones((both[0].shape[2],), dtype=mx.bool_)))
    mx.eval(expected)
    capacity = tokens + 9
    items, starts = [], [0]
    span = 512 if parted else capacity
    own_pieces = [(0, 1, capacity, 0), (1, 0, 256, 0), (0, 0, capacity, 600 if parted else 0)]
    for row, (slab, slot, room, origin) in enumerate(own_pieces):
        if origin:
            items += [(row, 2, 0, 700, 50, 562, 0, 0), (row, 2, 0, 700, 562, 650, 0, 0)]
        items += [(row, slab, slot, room, at, min(room, at + span), origin, 1) for at in range(0, room, span)]
        starts.append(len(items))
    items += [] if parted else [(3, -1, 0, 0, 0, 0, 0, 0)]
    starts.append(len(items))
    table = mx.stack([addresses_of(slab) for slab in slabs]).reshape(3, layers, 2)
    work = DecodeWork(mx.array(items), mx.array(starts), parted, table, mx.array(lengths))
    out = slab_decode(queries, (new[0], new[1]), work, mx.array([layer]), size**-0.5)
    mx.eval(out)
    for row in range(3):
        assert mx.abs(out[row : row + 1].astype(mx.float32) - expected[row]).max().item() < 0.02
    assert mx.abs(out[3]).max().item() == 0
    for part in (0, 1):
        written = slabs[0][2 * layer + part]
        assert mx.array_equal(written[1, :, tokens - 1], new[part, 0, :, 0]).item()
        assert mx.array_equal(written[0, :, 40], new[part, 2, :, 0]).item()
        assert mx.array_equal(slabs[1][2 * layer + part][0, :, 250], new[part, 1, :, 0]).item()


def draw(rows: list[Sampling], logits: mx.array, positions: mx.array) -> list[int]:
    positions = positions.astype(mx.int32)
    tokens, following = sample.sample(logits, sample.settings_of(rows), seeds(rows), positions)
    assert mx.array_equal(following, positions + 1).item()
    drawn: list[int] = tokens.tolist()  # type: ignore[assignment]
    return drawn


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_sampling_draws_what_the_reference_draws(dtype: mx.Dtype) -> None:
    """Every combination of temperature, top-k, top-p and min-p."""
    rows, logits, positions = grid()
    logits = logits.astype(dtype)
    drawn = draw(rows, logits, positions)
    assert disagreements(rows, drawn, reference_tokens(rows, logits, positions)) == []


def test_sampling_over_a_vocabulary_larger_than_a_block() -> None:
    """Only numbers that lie next to a border between two tokens may draw the other one."""
    rows, _, positions = grid()
    mx.random.seed(2)
    logits = mx.random.normal((len(rows), 50_000)) * 3
    drawn = draw(rows, logits, positions)
    expected = reference_tokens(rows, logits, positions)
    differing = sum(one != other for one, other in zip(drawn, expected, strict=True))
    assert differing <= len(rows) // 50
