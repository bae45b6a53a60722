"""Our CUDA kernels against plain formulas. Skipped where there is no CUDA."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from millstream.backend.device import current_device
from millstream.backend.generation.caches.class_caches import ClassCaches
from millstream.backend.generation.caches.flat_caches import FlatPrompts, side_by_side
from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.caches.widths import kernel_width, powers_of_two
from millstream.backend.generation.sampling.sampler import seeds
from millstream.backend.kernels import sample
from millstream.backend.kernels.decode_attention import Packing, slab_decode
from millstream.backend.kernels.prefill_attention import prefill_attention
from millstream.backend.kernels.write_rows import addresses_of, join_rows, move_rows, write_rows
from millstream.types import Sampling
from support.decode_cases import CASES, PACKED_8, DecodeCase, DecodeRun
from support.sampling_grid import disagreements, grid, reference_tokens

pytestmark = pytest.mark.skipif(
    current_device().kind != "cuda",
    reason="compares CUDA kernels with formulas: needs MLX's CUDA build and an NVIDIA GPU",
)


def plain(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    seen: mx.array,
    sinks: mx.array | None = None,
    cap: float | None = None,
) -> mx.array:
    share = queries.shape[1] // keys.shape[1]
    k, v = (mx.repeat(each.astype(mx.float32), share, 1) for each in (keys, values))
    scores = queries.astype(mx.float32) @ k.swapaxes(-1, -2) * scale
    scores = scores if cap is None else mx.tanh(scores / cap) * cap
    weights = mx.exp(mx.where(seen, scores, -1e30)) * seen
    total = mx.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sinks.astype(mx.float32)[None, :, None, None])
    return weights @ v / mx.maximum(total, 1e-30)


@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 2)])
@pytest.mark.parametrize(("count", "length"), [(2, 2), (17, 17), (64, 64), (100, 300), (256, 1000), (64, 3000)])
@pytest.mark.parametrize("padded", [False, True])
def test_prefill(size: int, dtype: mx.Dtype, heads: int, groups: int, count: int, length: int, padded: bool) -> None:
    check_prefill((size, size), dtype, heads, groups, count, length, padded=padded)


@pytest.mark.parametrize("sizes", [(64, 64), (192, 128), (256, 256)])
@pytest.mark.parametrize(("count", "length", "window"), [(17, 17, 5), (100, 300, 128), (64, 3000, 2048), (70, 90, 0)])
@pytest.mark.parametrize(("sinks", "cap"), [(False, None), (True, None), (False, 5.0)])
def test_prefill_with_windows_sinks_and_caps(
    sizes: tuple[int, int], count: int, length: int, window: int, sinks: bool, cap: float | None
) -> None:
    check_prefill(sizes, mx.bfloat16, 8, 2, count, length, window=window, with_sinks=sinks, cap=cap)


def check_prefill(
    sizes: tuple[int, int],
    dtype: mx.Dtype,
    heads: int,
    groups: int,
    count: int,
    length: int,
    *,
    padded: bool = False,
    window: int = 0,
    with_sinks: bool = False,
    cap: float | None = None,
) -> None:
    mx.random.seed(1)
    scale = sizes[0] ** -0.5
    queries = mx.random.normal((3, heads, count, sizes[0])).astype(dtype)
    keys, values = (mx.random.normal((3, groups, length + 37, size)).astype(dtype)[..., :length, :] for size in sizes)
    left = mx.array([0, min(7, length - 1), min(40, length - 1)], dtype=mx.int32)
    sinks = mx.random.normal((heads,)).astype(dtype) if with_sinks else None
    positions = mx.arange(length - count, length)[:, None]
    seen = ((mx.arange(length) <= positions) & (mx.arange(length) > positions - (window or length)))[None, None]
    if padded:
        seen = seen & (mx.arange(length) >= left[:, None, None, None])
    out = prefill_attention(
        queries, keys, values, scale, left if padded else None, window=window, sinks=sinks, softcap=cap
    )
    expected = plain(queries, keys, values, scale, seen, sinks, cap)
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


@pytest.mark.parametrize(("dtype", "size"), [(mx.bfloat16, 64), (mx.float32, 96), (mx.uint32, 16), (mx.bfloat16, 1)])
def test_rows_of_all_layers_join_at_once(dtype: mx.Dtype, size: int) -> None:
    """More arrays than a launch takes, slices of longer ones, two slabs, and a ring that wraps."""
    mx.random.seed(1)
    parts, heads, capacity = 34, 3, 40
    slabs = [[mx.zeros((3, heads, capacity, size), dtype=dtype) for _ in range(parts)] for _ in range(2)]
    sources = [(mx.random.normal((2, heads, 50, size)) * 100).astype(dtype)[:, :, :37] for _ in range(parts)]
    mx.eval(slabs, sources)
    table = mx.stack([addresses_of(slab) for slab in slabs]).reshape(2, parts // 2, 2)
    places = [(0, 2, capacity, 1, 3, 30, 0, 0), (1, 1, capacity, 0, 0, 37, 20, 0), (1, 0, capacity, 1, 5, 1, 39, 0)]
    mx.eval(join_rows(sources, places, table))
    for number, source in enumerate(sources):
        expected = [mx.zeros((3, heads, capacity, size), dtype=dtype) for _ in slabs]
        for slab, slot, _, row, first, count, column, _ in places:
            columns = (mx.arange(count) + column) % capacity
            expected[slab][slot, :, columns] = source[row, :, first : first + count]
        assert all(mx.array_equal(slabs[slab][number], expected[slab]).item() for slab in range(2))


@pytest.mark.parametrize("window", [0, 300])
def test_slabs_are_made_and_written_in_one_evaluation(window: int) -> None:
    """Rows join, also in slabs that are made for them, leave, and move: all that is sent between two steps."""
    mx.random.seed(1)
    template = mx.zeros((1, 3, 1, 64), dtype=mx.bfloat16)
    caches = ClassCaches([(template, template)] * 9, powers_of_two, width=kernel_width, kernels=True, window=window)
    caches.keep_vacant(True)
    held: list[list[mx.array]] = []

    def check() -> None:
        caches.begin_step()
        assert len(held) == sum(row is not None for row in caches.rows)
        for row, expected in zip(caches.rows, held, strict=False):
            assert row is not None
            for part, tokens in zip(row.place.arrays, expected, strict=True):
                assert mx.array_equal(caches._in_order(row, part), tokens[:, :, row.length - row.kept :]).item()

    for count in (1, 6, 17, 2):
        lengths = [20 + 61 * (index % 7) for index in range(count)]
        flat = [(sum(lengths[:index]), length) for index, length in enumerate(lengths)]
        layers = [tuple(mx.random.normal((1, 3, sum(lengths), 64)).astype(mx.bfloat16) for _ in "kv") for _ in range(9)]
        caches.join([JoiningRows(layers, (), flat=tuple(flat))])
        parts = [part for layer in layers for part in layer]
        held += [[part[:, :, first : first + tokens] for part in parts] for first, tokens in flat]
        check()
    caches.keep_vacant(False)
    for gone in ({3}, {0, 1, 2, 5, 8, 9, 13, 15}, {4, 6}):
        kept = [number for number in range(len(held)) if number not in gone]
        held = [held[number] for number in kept]
        caches.filter(kept)
        check()


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(("dtype", "size"), [(mx.bfloat16, 64), (mx.float16, 128), (mx.bfloat16, 256)])
def test_attention_of_prompts_one_after_the_other(dtype: mx.Dtype, size: int, window: int) -> None:
    mx.random.seed(1)
    lengths, total, heads, groups = (80, 1, 130, 61), 384, 4, 2
    firsts = [sum(lengths[:number]) for number, length in enumerate(lengths) for _ in range(length)]
    prompts = FlatPrompts(mx.zeros((total,)), mx.array([*firsts, *range(len(firsts), total)], dtype=mx.int32))
    shapes = [(total, count, 1, size) for count in (heads, groups, groups)]
    queries, keys, values = (mx.random.normal(shape).astype(dtype) for shape in shapes)
    mask = prompts.mask(window)
    flat = [side_by_side(each) for each in (queries, keys, values)]
    out = prefill_attention(*flat, 0.1, prompts.firsts, window=window, flat=True)
    plain = [each.astype(mx.float32) for each in flat]
    expected = mx.fast.scaled_dot_product_attention(*plain, scale=0.1, mask=mask)
    assert mx.abs(out.astype(mx.float32) - expected).max().item() < 0.02


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("name", CASES)
def test_decode(name: str, dtype: mx.Dtype) -> None:
    """Rows of unequal length in two slabs, and a row without tokens."""
    mx.random.seed(1)
    case = replace(CASES[name], dtype=dtype)
    if case.packing is not None and dtype == mx.float32:
        pytest.skip("packed slabs are for models in half precision")
    check_decode(case)


@pytest.mark.parametrize(("size", "share"), [(64, 1), (96, 4), (128, 8), (192, 12), (256, 4), (256, 16)])
def test_decode_with_heads_of_several_sizes(size: int, share: int) -> None:
    mx.random.seed(1)
    check_decode(DecodeCase((37, 0, 900), mx.bfloat16, size=size, share=share, capacity=1024))


@pytest.mark.parametrize("packing", [None, PACKED_8])
@pytest.mark.parametrize(("size", "share", "window"), [(64, 4, 0), (128, 8, 0), (64, 2, 80)])
def test_a_query_gets_the_same_bits_in_a_pass_of_several_tokens(
    size: int, share: int, window: int, packing: Packing | None
) -> None:
    mx.random.seed(1)
    capacity = 96 if window else 1024
    case = DecodeCase((37, 0, 90, 254, 700), mx.bfloat16, size=size, share=share, count=5, packing=packing)
    run = DecodeRun(replace(case, window=window, capacity=capacity, span=32 if window else 256), addresses_of)
    together = run.run(slab_decode)
    for index in range(case.count):
        alone = slab_decode(
            run.queries[:, :, index : index + 1],
            (run.new[0][:, :, index : index + 1], run.new[1][:, :, index : index + 1]),
            replace(run.work, lengths=run.work.lengths + index, count=1),
            run.layer,
            run.scale,
            packing=packing,
        )
        assert mx.array_equal(alone, together[:, :, index : index + 1]).item(), f"token {index}"


def check_decode(case: DecodeCase) -> None:
    run = DecodeRun(case, addresses_of)
    out = run.run(slab_decode).astype(mx.float32)
    assert mx.abs(out - run.expected()).max().item() < 0.02
    assert mx.array_equal(out, run.run(slab_decode).astype(mx.float32)).item(), "counters are zero again"
    assert run.wrong_columns() == 0
    assert mx.abs(run.work.counters).max().item() == 0


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
