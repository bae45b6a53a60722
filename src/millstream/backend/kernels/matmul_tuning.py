"""What was measured at load: for which weights and widths MLX's own operations are faster than our kernel, and which
shape of blocks is fastest for few rows."""

from __future__ import annotations

import dataclasses
from typing import Literal

from millstream.backend.kernels.matmul_tilings import USUAL, BlockShape, width_of
from millstream.backend.kernels.weights import Packed, PackedForm, Weight

Role = Literal["matmul", "matmul_add", "glu", "qkv_rope"]
"""What a weight is used for: the function of `small_matmul`."""
Key = tuple[Role, int, int, int]
"""Role, outputs and inputs of a weight, width."""

Size = tuple[PackedForm | None, int, int]
"""How a weight is packed, its outputs and its inputs."""

_by_mlx: dict[Key, bool] = {}
_shapes: dict[Size, BlockShape] = {}


def known(key: Key) -> bool:
    """True if it was decided."""
    return key in _by_mlx


def decide(key: Key, by_mlx: bool) -> None:
    """Functions that are compiled later follow it."""
    _by_mlx[key] = by_mlx


def by_mlx(role: Role, outputs: int, inputs: int, rows: int) -> bool:
    """True if MLX's operations were faster for so many rows."""
    return _by_mlx.get((role, outputs, inputs, width_of(rows)), False)


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
