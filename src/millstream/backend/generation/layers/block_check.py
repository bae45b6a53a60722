"""Compares the numbers of a fused block with those of the block that it stands for, on this device.

What a block is made of is guessed from its modules (`block_frame`, `block_parts`). A guess that gives other numbers is
not used, so a new version of mlx-lm that changes a block can only lead to a slower one, and the log says so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache

from millstream.backend.generation.caches.class_caches import ClassCaches
from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.caches.slots import SlotCaches
from millstream.backend.generation.caches.widths import CHUNK_LENGTHS, exact, kernel_width
from millstream.backend.generation.layers.block_frame import Frame, NotUnderstood, frame_guess, watched_frame
from millstream.backend.generation.layers.block_parts import AttentionParts
from millstream.backend.generation.layers.fused_parts import FusedAttention
from millstream.backend.kernels.compiled import rehearse
from millstream.backend.kernels.small_matmul import WIDTHS
from millstream.backend.layers.fused_matmul import BY_KERNELS, FusedMatmuls
from millstream.backend.layers.matmul_check import check_calls

TOLERANCE = {mx.float32: 0.01, mx.float16: 0.05, mx.bfloat16: 0.05}
"""How far a fused part may be from the original, relative to what the part adds to its input. GPUs round float32 to
TF32 in matmuls."""
COLUMNS = 8
"""Tokens that the rows of the comparison have in their caches, at most."""
STEPS = 3
"""Tokens that a module with a state of its own reads before it is compared."""
FAR = (0, 1, 1000, 20_000)
"""Positions at which rotary embeddings are compared."""
FAR_TOLERANCE = 0.01
WHAT_CODE_RAISES = (ValueError, TypeError, RuntimeError, AttributeError, IndexError, KeyError)
"""What a block may raise that was understood wrongly."""

Half = Callable[[mx.array], mx.array]
Check = TypeVar("Check", bound=Callable[..., Any])


class HasMatmuls(Protocol):
    """A fused part of a block."""

    def run_matmuls(self, x: mx.array) -> None: ...


def check_matmuls(matmuls: FusedMatmuls, part: HasMatmuls, size: int, dtype: mx.Dtype) -> None:
    """Have the kernels of a fused part compared with MLX's operations, each by itself, at every number of rows: the
    other checks see few. What differs is left to MLX from then on, so they come after this."""
    if matmuls is BY_KERNELS:
        check_calls(lambda: part.run_matmuls(mx.zeros((1, 1, size), dtype=dtype)))


def checked_frame(block: Any) -> Frame:
    """The frame of a block. Raises `NotUnderstood` if it gives other numbers."""
    try:
        frame, x, expected = watched_frame(block, WIDTHS[0])
        apart = _difference(x, expected, frame_guess(frame, block, x))
    except WHAT_CODE_RAISES as error:
        raise NotUnderstood(f"is not a block of mixer and MLP ({_words(error)})") from error
    agree(apart, x.dtype)
    return frame


def rehearsed(check: Check) -> Check:
    """A check that compiles the kernels of its kind at once before it first runs."""
    done: set[tuple[object, ...]] = set()

    @functools.wraps(check)
    def run(*arguments: Any, **options: Any) -> Any:
        # Other blocks of a model have the same kernels.
        key = tuple(each if isinstance(each, int | mx.Dtype) else type(each) for each in arguments)
        if key not in done:
            done.add(key)
            rehearse(lambda: check(*arguments, **options))
        return check(*arguments, **options)

    return run  # type: ignore[return-value]


@rehearsed
def check_attention(
    original: Callable[..., mx.array],
    parts: AttentionParts,
    decode: FusedAttention,
    chunk: FusedAttention,
    size: int,
    dtype: mx.Dtype,
    *,
    kernels: bool,
) -> None:
    """Raises `NotUnderstood` if fused attention gives other numbers, over slabs or over the first chunk of a prompt."""
    rows = WIDTHS[0]
    x = _random(dtype, 1, rows, 1, size)
    keys, values = (_random(dtype, seed, rows, parts.groups, COLUMNS, parts.size) for seed in (2, 3))
    joining = JoiningRows([(keys, values)], tuple(row % COLUMNS for row in range(rows)))
    ours = ClassCaches(joining.layers, exact, width=kernel_width, kernels=kernels)
    ours.join([joining])
    ours.begin_step()

    def by_rectangle(dims: int) -> mx.array:
        """The original gets a rectangle and a mask, as it would from MLX."""
        plain = SlotCaches(1, exact, mask_dims=dims)
        plain.join([joining])
        plain.begin_step()
        mx.eval(plain.layers[0].parts)
        return original(x, plain.mask, plain.layers[0])

    _compare(x, [lambda: by_rectangle(4), lambda: by_rectangle(5)], lambda: decode.run(x, None, ours.layers[0]))
    check_chunk(original, chunk, size, dtype)


def check_chunk(original: Callable[..., mx.array], chunk: FusedAttention, size: int, dtype: mx.Dtype) -> None:
    """Raises `NotUnderstood` if fused attention gives other numbers over the first chunk of a prompt."""
    x = _random(dtype, 4, 1, CHUNK_LENGTHS[0], size)
    start = mx.array([0], dtype=mx.int32)
    trouble: NotUnderstood | None = None
    # Attention of a model's own may take masks that are arrays only.
    for mask in ("causal", create_causal_mask(CHUNK_LENGTHS[0])):
        try:
            expected = original(x, mask, KVCache())
        except WHAT_CODE_RAISES as error:
            trouble = NotUnderstood(f"cannot read a chunk ({_words(error)})")
            continue
        _compare(x, [functools.partial(_same, expected)], functools.partial(chunk.run, x, mask, KVCache(), start))
        return
    assert trouble is not None, "there are masks"
    raise trouble


def _evaluated(x: mx.array) -> mx.array:
    mx.eval(x)
    return x


def _same(x: mx.array) -> mx.array:
    return x


@contextmanager
def uncompiled() -> Iterator[None]:
    """On a GPU, run MLX's operations one by one: compiling those that it fuses takes seconds, and in float32 none is
    used again."""
    if mx.default_device() == mx.Device(mx.DeviceType.cpu, 0):
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def check_rope(module: Any, rope: Callable[[mx.array, mx.array], mx.array], size: int) -> None:
    """Raises `NotUnderstood` if a rotary embedding was read wrongly. Positions of the other comparisons are small."""
    x = mx.random.normal((len(FAR), 1, 1, size), key=mx.random.key(9))
    expected = mx.concatenate([module(x[row : row + 1], offset=place) for row, place in enumerate(FAR)])
    if not _difference(mx.zeros_like(x), expected, rope(x, mx.array(FAR, dtype=mx.int32))) <= FAR_TOLERANCE:
        raise NotUnderstood(f"has another rotary embedding ({type(module).__name__})")


def check_half(original: Half, fused: Half, size: int, dtype: mx.Dtype, form: int = 0) -> None:
    """Raises `NotUnderstood` if the fused form of a part without a cache gives other numbers. `form` tells those apart
    that have other kernels: each of them is rehearsed."""
    agree(half_difference(original, fused, size, dtype, form), dtype)


@rehearsed
def half_difference(original: Half, fused: Half, size: int, dtype: mx.Dtype, form: int = 0) -> float:
    """How far they are apart; `form` as for `check_half`. Raises `NotUnderstood` if one of them cannot run."""
    x = _random(dtype, 5, WIDTHS[0], 1, size)
    try:
        return _difference(x, original(x), fused(x))
    except WHAT_CODE_RAISES as error:
        raise NotUnderstood(f"cannot run fused ({_words(error)})") from error


def random_rows(size: int, dtype: mx.Dtype, rows: int = WIDTHS[0]) -> mx.array:
    """Rows of a decode step, for `check_rows`."""
    return _random(dtype, 5, rows, 1, size)


@rehearsed
def check_rows(original: Half, fused: Half, x: mx.array, share: float) -> None:
    """As `check_half`, for parts that make a choice for each row: in half precision a `share` of the rows may be near
    the border between two choices, where a last bit decides."""
    try:
        # One after the other: what is evaluated together may run at the same time.
        expected, got = (_evaluated(each(x).astype(mx.float32)) for each in (original, fused))
    except WHAT_CODE_RAISES as error:
        raise NotUnderstood(f"cannot run fused ({_words(error)})") from error
    rows = x.shape[0]
    new, whole, wrong = (
        mx.linalg.norm(each.reshape(rows, -1), axis=-1) for each in (expected - x, expected, got - expected)
    )
    apart = wrong / mx.maximum(new, 32 * mx.finfo(x.dtype).eps * whole)
    allowed = 0 if x.dtype == mx.float32 else int(rows * share)
    # Not a number sorts anywhere: it is no agreement.
    distances: list[float] = apart.tolist()  # type: ignore[assignment]
    worst = sorted(math.inf if math.isnan(each) else each for each in distances)
    agree(worst[-1 - allowed], x.dtype)


@rehearsed
def check_module(
    original: Callable[..., mx.array],
    fused: Callable[..., mx.array],
    new_cache: Callable[[], Any],
    size: int,
    dtype: mx.Dtype,
) -> None:
    """The same for a module that keeps a state: after a few tokens, and it must leave the same state."""
    xs = [_random(dtype, 6 + step, WIDTHS[0], 1, size) for step in range(STEPS + 2)]

    def after_some(first: Callable[..., mx.array]) -> mx.array:
        cache = new_cache()
        for x in xs[:STEPS]:
            mx.eval(original(x, None, cache))
        one = first(xs[STEPS], None, cache)
        # What a step leaves is seen in the next one.
        return mx.concatenate([one, original(xs[STEPS + 1], None, cache)])

    _compare(mx.concatenate(xs[STEPS:]), [lambda: after_some(original)], lambda: after_some(fused))


def _compare(x: mx.array, originals: list[Callable[[], mx.array]], fused: Callable[[], mx.array]) -> None:
    """One of the originals must agree; they are ways to ask for the same thing."""
    try:
        got = fused()
        mx.eval(got)
    except WHAT_CODE_RAISES as error:
        raise NotUnderstood(f"cannot run fused ({_words(error)})") from error
    found, errors = [], []
    for original in originals:
        try:
            found.append(_difference(x, original(), got))
        except WHAT_CODE_RAISES as error:
            errors.append(_words(error))
            continue
        if found[-1] <= TOLERANCE.get(x.dtype, 0.0):
            return
    if not found:
        raise NotUnderstood(f"cannot run alone ({errors[0]})")
    agree(min(found), x.dtype)


def agree(apart: float, dtype: mx.Dtype) -> None:
    """Raises `NotUnderstood` if numbers are too far apart."""
    # Not a number is no agreement either.
    if not apart <= TOLERANCE.get(dtype, 0.0):
        raise NotUnderstood(f"differs by {apart:.2g} from mlx-lm's")


def _difference(x: mx.array, expected: mx.array, got: mx.array) -> float:
    """Relative to what the block adds to `x`, or to rounding if it adds next to nothing."""
    rounding = 32 * mx.finfo(x.dtype).eps
    x, expected, got = (each.astype(mx.float32) for each in (x, expected, got))
    scale = mx.maximum(mx.linalg.norm(expected - x), rounding * mx.linalg.norm(expected))
    return float((mx.linalg.norm(got - expected) / scale).item())  # type: ignore[arg-type]


def _random(dtype: mx.Dtype, seed: int, *shape: int) -> mx.array:
    numbers: mx.array = mx.random.normal(shape, key=mx.random.key(seed))
    return numbers.astype(dtype)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
