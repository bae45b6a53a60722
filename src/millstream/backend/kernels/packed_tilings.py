"""Which packed weights the few-row matmuls take, and the shape of a block for them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import mlx.core as mx

from millstream.backend.kernels.matmul_tilings import (
    GROUP,
    MAX_SHARED,
    MIN_DEPTH,
    SLICES,
    USUAL,
    WARPS,
    WIDTHS,
    BlockShape,
    Tiling,
    shared_limit,
    walking_depth,
)
from millstream.backend.kernels.unpack_cuda import MODES
from millstream.backend.kernels.weights import Packed, PackedForm

BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "nvfp4": (4,), "mxfp8": (8,)}
FOUR_BITS = PackedForm(4, 64, "affine", biased=True)
MAX_WIDTH = 32
"""Rows of x per block; more rows are more blocks, beside each other. Sums of 64 rows and four tiles need more registers
than there are, and such kernels take long to compile."""
TILES = (4, 2, 1)
FEW_ROWS = 16
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


def unit_of(form: PackedForm) -> int:
    """The numbers of a row that a slice of K has at least: whole groups, and scales of at least four bytes."""
    return 256 if form.group_size == 128 else 128


@dataclass(frozen=True, slots=True)
class PackedTiling(Tiling):
    """A block's warps, for a weight of this form and so many inputs: `per` units are fetched at a time."""

    form: PackedForm = FOUR_BITS
    inputs: int = 4096
    per: int = 1

    @property
    def aligned(self) -> bool:
        """True if each row has whole units, so that its scales begin at whole units too."""
        return self.inputs % unit_of(self.form) == 0

    @property
    def constants(self) -> list[tuple[str, int | bool]]:
        form = self.form
        return [
            ("NW", self.beside),
            ("MT", self.tiles),
            ("KW", self.along),
            ("S", self.split),
            ("Q", self.group),
            ("DEPTH", self.depth),
            ("BITS", form.bits),
            ("GS", form.group_size),
            ("MODE", MODES[form.mode]),
            ("UNIT", unit_of(form)),
            ("PER", self.per),
            ("ALIGNED", self.aligned),
        ]

    def stage_bytes(self, width: int) -> int:
        form, numbers = self.form, unit_of(self.form) * self.per
        size, arrays = (2, 2) if form.mode == "affine" else (1, 1)
        scales = numbers // form.group_size * size + (0 if self.aligned else 4)
        padded = numbers * form.bits // 8 + (32 if form.bits == 8 else 16)
        return self.threads // 32 * 16 * self.tiles * (padded + arrays * scales)


def choose(weight: Packed, width: int, *, head: int, shape: BlockShape = USUAL) -> PackedTiling:
    """A tiling for a weight; with `head` its tiles are heads of that size. Wide steps have more tiles per warp, if the
    shared memory suffices: each number of x that a warp reads is multiplied with all of them. `shape`: for the first
    width, without heads."""
    tiles: tuple[int, ...] = TILES if head or width > FEW_ROWS else TILES[1:]
    if not head and width == WIDTHS[0]:
        if shape.walks and (walking := _walking(weight, shape.tiles)) is not None:
            return walking
        tiles = tiles[tiles.index(shape.tiles) :]
    tilings = [_tiling(weight, width, head, each) for each in tiles]
    found = next((tiling for tiling in tilings if tiling is not None), None)
    if found is None:
        raise ValueError(f"a block has too little shared memory for heads of {head} numbers, packed as {weight.form}")
    return found


def _walking(weight: Packed, tiles: int) -> PackedTiling | None:
    """For blocks that walk; None if they would have too little memory."""
    tiling = PackedTiling(1, tiles, SLICES, walks=True, form=weight.form, inputs=weight.inputs)
    depth = walking_depth(tiling)
    return dataclasses.replace(tiling, depth=depth) if depth >= MIN_DEPTH else None


def _tiling(weight: Packed, width: int, head: int, tiles: int) -> PackedTiling | None:
    """The tiling with so many tiles per warp; None if it is not possible here."""
    beside, rest = divmod(head, 16 * tiles) if head else (1, 0)
    if rest or beside > 4:
        return None
    along = max(GROUP, WARPS // beside // GROUP * GROUP)
    while True:
        split = SLICES // along if weight.tickets is not None else 1
        tiling = PackedTiling(beside, tiles, along, split, form=weight.form, inputs=weight.inputs)
        tiling = with_depth(tiling, width)
        if tiling.shared_bytes(width) <= shared_limit():
            return tiling
        if weight.tickets is None or along == GROUP or not head:
            return None
        along //= 2


def with_depth(tiling: PackedTiling, width: int) -> PackedTiling:
    return dataclasses.replace(tiling, depth=min(4, max(2, MAX_SHARED // tiling.stage_bytes(width))))
