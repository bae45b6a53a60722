"""Which packed weights the few-row matmuls take, and the shape of a block for them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import mlx.core as mx

from millstream.backend.kernels.matmul_tilings import (
    GROUP,
    SLICES,
    USUAL,
    WARPS,
    WIDTHS,
    BlockShape,
    Body,
    Tiling,
    shared_limit,
)
from millstream.backend.kernels.multiprocessors import multiprocessors
from millstream.backend.kernels.unpack_cuda import form_constants
from millstream.backend.kernels.weights import Packed, PackedForm

BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "nvfp4": (4,), "mxfp8": (8,)}
FOUR_BITS = PackedForm(4, 64, "affine", biased=True)
TILES = 2
"""Of 16 rows of the weight, per warp, if there are many rows of x: more would need too many registers."""
BESIDE = 4
"""Warps of a block with many rows of x, if its tiles are not heads."""
ROUND = 3
"""Units of x that a block with many rows keeps in shared memory: one that it multiplies, and two on their way."""
SPLITS = (1, 4, 8)
"""How many blocks may share a tile."""
FILLED = 0.9
"""The part of all multiprocessors that is enough to have one block each."""
MAX_THREADS = 256
"""Of a block, so that each may have all registers that it asks for."""
GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,), "nvfp4": (16,), "mxfp8": (32,)}


def fits(weight: Packed) -> bool:
    """True if the kernels can take this weight: of a known format, with rows of whole 16 bytes."""
    affine = weight.mode == "affine"
    return (
        weight.bits in BITS.get(weight.mode, ())
        and weight.group_size in GROUP_SIZES[weight.mode]
        and weight.packed.ndim == 2
        and (weight.scales.dtype in (mx.bfloat16, mx.float16) if affine else weight.scales.dtype == mx.uint8)
        and (weight.biases is not None) == affine
        and weight.inputs % 32 == 0
        and weight.inputs * weight.bits % 128 == 0
        and weight.outputs % 2 == 0
    )


UNIT = 128
"""Numbers of a row of the weight that a warp reads at once."""


@dataclass(frozen=True, slots=True)
class PackedTiling(Tiling):
    """A block's warps, for a weight of this form and so many inputs. With `many` rows of x they go through K together,
    else each has a slice of it."""

    form: PackedForm = FOUR_BITS
    inputs: int = 4096
    many: bool = False
    crowded: bool = False
    """As many blocks as tiles, instead of as many as the GPU runs at once."""

    @property
    def constants(self) -> list[tuple[str, int | bool]]:
        return [
            *self.shape_constants,
            *form_constants(self.form),
            ("ALIGNED", self.inputs % UNIT == 0),
        ]

    def area(self, width: int) -> int:
        """Bytes for x, where all sums lie in the end."""
        return -(-max(ROUND * UNIT * width * 2, width * (self.lines + 1) * 4) // 16) * 16

    def shared_bytes(self, width: int) -> int:
        if not self.many:
            return self.along * width * (self.lines + 1) * 4
        return self.area(width) + (self.lines * width * 4 if self.split == 1 else 0)

    def partial_floats(self, width: int) -> int:
        if not self.many:
            return Tiling.partial_floats(self, width)
        return self.split * (width * self.lines + -(-width // 8 // self.beside) * self.threads)

    @property
    def body(self) -> Body:
        return "many rows" if self.many else "walking" if self.walks else "warps"

    def blocks(self, tiles: int, width: int) -> int:
        return tiles * self.split if self.crowded else Tiling.blocks(self, tiles, width)


def choose(
    weight: Packed, width: int, bands: int = 1, *, head: int, within: int = 0, shape: BlockShape = USUAL
) -> PackedTiling:
    """A tiling for a weight. With `head` its tiles are heads of that size, with `within` they are parts of them.
    `shape`: for the first width, without heads."""
    few = width == WIDTHS[0]
    form, inputs, counted = weight.form, weight.inputs, weight.tickets is not None
    if few and not head:
        return PackedTiling(1, shape.tiles, SLICES, form=form, inputs=inputs, walks=True, crowded=not shape.walks)
    beside, tiles = _whole_head(head) if head else (_beside(within), TILES)
    if few and counted and beside * GROUP <= WARPS:
        along = max(GROUP, WARPS // beside // GROUP * GROUP)
        tiling = PackedTiling(beside, tiles, along, SLICES // along, form=form, inputs=inputs)
    else:
        tiling = PackedTiling(beside, tiles, 1, form=form, inputs=inputs, many=True)
        blocks = -(-weight.outputs // tiling.lines) * bands
        tiling = dataclasses.replace(tiling, split=_split(blocks) if counted else 1)
    if tiling.threads > MAX_THREADS or tiling.shared_bytes(width) > shared_limit():
        raise ValueError(f"a block has too little room for heads of {head} numbers, packed as {form}")
    return tiling


def _beside(within: int) -> int:
    """Warps beside each other whose tiles are a part of so many rows of the weight."""
    return next(beside for beside in range(BESIDE, 0, -1) if within % (16 * TILES * beside) == 0)


def _split(blocks: int) -> int:
    """How many blocks share a tile: about as many as it takes for each multiprocessor to have one."""
    return next((split for split in SPLITS if blocks * split >= FILLED * multiprocessors()), SPLITS[-1])


def _whole_head(size: int) -> tuple[int, int]:
    """Warps beside each other and tiles per warp that are one head."""
    tiles = TILES if size % (16 * TILES) == 0 else 1
    return size // (16 * tiles), tiles
