"""What was measured at load: for which weights and widths MLX's own operations are faster than our kernel, and which
shape of blocks is fastest for few rows.

A kernel whose numbers were seen to differ from MLX's is refused, however fast it is (`layers/matmul_check.py`).

Our kernels give a row the same numbers at every width, cuBLAS does not always. So a pass that verifies drafts takes the
choices of the plain step whose answer it must give, however much wider it is (`as_step_of`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import mlx.core as mx

from millstream.backend.kernels.matmul_tilings import (
    MANY_WIDTHS,
    MOST_ROWS,
    STEP_WIDTHS,
    USUAL,
    WIDTHS,
    BlockShape,
    many_width,
    width_of,
)
from millstream.backend.kernels.weights import Packed, PackedForm, Weight

Role = Literal["matmul", "matmul_add", "glu", "qkv_rope"]
"""What a weight is used for: the function of `small_matmul`."""
Key = tuple[Role, int, int, int]
"""Role, outputs and inputs of a weight, width."""

Size = tuple[PackedForm | None, int, int]
"""How a weight is packed, its outputs and its inputs."""

_step: ContextVar[int | None] = ContextVar("rows of the plain step that a pass stands for", default=None)
_by_mlx: dict[Key, bool] = {}
_steady_to: dict[Key, int] = {}
"""Where MLX's operations were chosen: up to how many rows they give a row the same numbers."""
_shapes: dict[Size, BlockShape] = {}
_warpgroups: dict[Size, bool] = {}
_groups: dict[tuple[Size, int], bool] = {}
_refused: set[tuple[Role, Size, int]] = set()
_refused_ends: set[str] = set()
_pass_limits: dict[int, int] = {}
"""By the width of steps: the most tokens of passes that stand for them, where wider ones give wrong numbers."""
_expected: list[int] = []
"""The most rows that each load so far asked for."""


def known(key: Key) -> bool:
    """True if it was decided."""
    return key in _by_mlx


def decide(key: Key, by_mlx: bool, *, steady_to: int = MOST_ROWS) -> None:
    """Functions that are compiled later follow it. `steady_to`: up to how many rows MLX's operations give a row the
    same numbers as at this width."""
    _by_mlx[key] = by_mlx
    _steady_to[key] = steady_to if by_mlx else MOST_ROWS


def exact_passes() -> tuple[tuple[int, int], ...]:
    """(rows, tokens): passes of up to so many tokens give a row the numbers of a plain step of up to so many rows, for
    each width of plain steps."""
    return tuple((width, min([_pass_limits.get(width, MOST_ROWS), *_steadiness(width)])) for width in WIDTHS)


def _steadiness(width: int) -> list[int]:
    return [steady for key, steady in _steady_to.items() if key[-1] == width]


def refuse(role: Role, weight: Weight, rows: int) -> None:
    """Our kernel gives wrong numbers for weights of this size and steps of so many rows: MLX's operations are taken.
    Whether these give a row the same numbers in a pass is not asked, so such steps do not speculate. Functions that are
    compiled later follow it."""
    _refused.add((role, size_of(weight), step_width(rows)))
    if rows <= WIDTHS[-1]:
        limit_passes(rows, 0)


def refused(role: Role, weight: Weight, rows: int) -> bool:
    """True for so many rows, or for a pass that stands for a step of so many."""
    return bool(_refused) and (role, size_of(weight), step_width(_step.get() or rows)) in _refused


def limit_passes(rows: int, tokens: int) -> None:
    """Passes of more tokens give wrong numbers to steps of so many rows."""
    width = width_of(rows)
    _pass_limits[width] = min(tokens, _pass_limits.get(width, MOST_ROWS))


def refuse_end(name: str) -> None:
    """A kernel for what stands after a product gives wrong numbers: MLX's operations are taken."""
    _refused_ends.add(name)


def takes_end(name: str) -> bool:
    return name not in _refused_ends


def step_width(rows: int) -> int:
    """The width of a step of so many rows, many or not; more than the kernels take count as most."""
    return width_of(rows) if rows <= WIDTHS[-1] else many_width(min(rows, MOST_ROWS))


def choice_width(rows: int) -> int:
    """The width whose choices so many rows take: that of the step that a pass stands for."""
    return width_of(_step.get() or rows)


def by_mlx(role: Role, outputs: int, inputs: int, rows: int) -> bool:
    """True if MLX's operations were faster for so many rows, or for those of the step that a pass stands for."""
    return _by_mlx.get((role, outputs, inputs, choice_width(rows)), False)


def expect_rows(rows: int) -> None:
    """A model will be loaded whose decode steps have up to so many rows: only those widths are worth measuring."""
    _expected.append(rows)


def many_widths() -> tuple[int, ...]:
    """The widths beyond the usual ones that a decode step may have."""
    narrower = (WIDTHS[-1], *MANY_WIDTHS)
    return tuple(
        width for width, below in zip(MANY_WIDTHS, narrower, strict=False) if max(_expected, default=0) > below
    )


def is_many(rows: int) -> bool:
    """True for a decode step of more rows than the usual widths have, and not more than the kernels take."""
    return WIDTHS[-1] < rows <= MOST_ROWS and _step.get() is None


def step_rows() -> tuple[int, ...]:
    """Numbers of rows that steps may have here: widths, and whole bands of the last one if there may be so many."""
    most = max([WIDTHS[-1], *many_widths()])
    return (*STEP_WIDTHS, *range(2 * WIDTHS[-1], most + 1, WIDTHS[-1]))


def many_by_kernel(role: Role, outputs: int, inputs: int, rows: int) -> bool:
    """True if our kernel was found to be right and faster for a step of so many rows."""
    return is_many(rows) and not _by_mlx.get((role, outputs, inputs, many_width(rows)), True)


@contextmanager
def as_step_of(rows: int) -> Iterator[None]:
    """What is traced or called in here, several tokens per row, computes each by what a plain step of so many rows
    takes."""
    before = _step.set(rows)
    try:
        yield
    finally:
        _step.reset(before)


def stands_for() -> int | None:
    """The rows of the plain step that a pass stands for; None in such a step itself."""
    return _step.get()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`mx.compile`, for functions in which these choices are made: each step that a pass stands for has its own."""
    by_step: dict[int | None, Callable[..., Any]] = {}

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        step = _step.get()
        if step not in by_step:
            by_step[step] = mx.compile(functools.partial(function))
        return by_step[step](*args, **named)

    return call


def decide_body(size: Size, warpgroups: bool | None) -> None:
    """Whether weights of a size multiply in warp groups, where there are any. None: it is open again. Functions that
    are compiled later follow it."""
    if warpgroups is None:
        _warpgroups.pop(size, None)
    else:
        _warpgroups[size] = warpgroups


def body_known(size: Size) -> bool:
    return size in _warpgroups


def takes_warpgroups(weight: Weight) -> bool:
    return _warpgroups.get(size_of(weight), True)


def decide_groups(size: Size, width: int, groups: bool | None) -> None:
    """Whether steps of this width multiply with packed weights of a size in groups of warps (`packed_groups`). None: it
    is open again. Functions that are compiled later follow it."""
    if groups is None:
        _groups.pop((size, width), None)
    else:
        _groups[size, width] = groups


def groups_known(size: Size, width: int) -> bool:
    return (size, width) in _groups


def in_groups(weight: Packed, rows: int) -> bool:
    """True if it was decided so for as many rows, or for those of the step that a pass stands for."""
    return _groups.get((size_of(weight), choice_width(rows)), False)


def size_of(weight: Weight) -> Size:
    form = dataclasses.replace(weight.form, counted=False) if isinstance(weight, Packed) else None
    return form, weight.outputs, weight.inputs


def shape_known(size: Size) -> bool:
    return size in _shapes


def decide_shape(size: Size, shape: BlockShape | None) -> None:
    """Functions that are compiled later follow it. None: it is open again."""
    if shape is None:
        _shapes.pop(size, None)
    else:
        _shapes[size] = shape


def block_shape(weight: Weight) -> BlockShape:
    return _shapes.get(size_of(weight), USUAL)
