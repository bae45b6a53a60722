"""What was measured at load: for which weights and widths MLX's own operations are faster than our kernel."""

from __future__ import annotations

from typing import Literal

from millstream.backend.kernels.matmul_tilings import width_of

Role = Literal["matmul", "matmul_add", "glu", "qkv_rope"]
"""What a weight is used for: the function of `small_matmul`."""
Key = tuple[Role, int, int, int]
"""Role, outputs and inputs of a weight, width."""

_by_mlx: dict[Key, bool] = {}


def known(key: Key) -> bool:
    """True if it was decided."""
    return key in _by_mlx


def decide(key: Key, by_mlx: bool) -> None:
    """Functions that are compiled later follow it."""
    _by_mlx[key] = by_mlx


def by_mlx(role: Role, outputs: int, inputs: int, rows: int) -> bool:
    """True if MLX's operations were faster for so many rows."""
    return _by_mlx.get((role, outputs, inputs, width_of(rows)), False)
