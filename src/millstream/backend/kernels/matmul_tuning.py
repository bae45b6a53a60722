"""What was measured at load: which shape of blocks is fastest for a weight, or that MLX's own operations are.

All shapes cut K alike, so a choice among them changes no number. MLX's operations (cuBLAS) give others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from millstream.backend.kernels import matmul_tilings
from millstream.backend.kernels.matmul_tilings import Tiling, width_of

Role = Literal["matmul", "matmul_add", "glu", "qkv_rope"]
"""What a weight is used for: the function of `small_matmul`."""
Choice = Tiling | Literal["mlx"]
Key = tuple[Role, int, int, int]
"""Role, outputs and inputs of a weight, width."""

_chosen: dict[Key, Choice] = {}


def choice(key: Key) -> Choice | None:
    """What was chosen; None if nothing was measured."""
    return _chosen.get(key)


def choose(key: Key, chosen: Choice) -> None:
    """Functions that are compiled later use it."""
    _chosen[key] = chosen


@contextmanager
def chosen(key: Key, choice: Choice) -> Iterator[None]:
    """For a measurement."""
    before = _chosen.get(key)
    _chosen[key] = choice
    try:
        yield
    finally:
        if before is None:
            del _chosen[key]
        else:
            _chosen[key] = before


def by_mlx(role: Role, outputs: int, inputs: int, rows: int) -> bool:
    """True if MLX's operations were faster for so many rows."""
    return _chosen.get((role, outputs, inputs, width_of(rows))) == "mlx"


def tiling_for(role: Role, outputs: int, inputs: int, width: int) -> Tiling:
    """The tiling for a weight whose tiles may be shared: the measured one, or the usual one."""
    found = _chosen.get((role, outputs, inputs, width))
    if isinstance(found, Tiling):
        return found
    return matmul_tilings.choose(outputs, inputs, width, head=0, shared=True)
