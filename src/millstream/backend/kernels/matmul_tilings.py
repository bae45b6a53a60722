"""The shape of a block of the few-row matmuls, for a weight and a number of rows."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import mlx.core as mx

from millstream.backend.kernels import warpgroup_source
from millstream.backend.kernels.multiprocessors import multiprocessors

WIDTHS = (8, 32, 64)
"""Numbers of rows that kernels are compiled for. More rows are bands of the last one."""
MOST_ROWS = 4 * WIDTHS[-1]
"""Of such bands: a weight has counters for no more."""
MANY_WIDTHS = (128, MOST_ROWS)
"""Further numbers of rows, for decode steps of many rows: warp groups take all of them at once."""
STEP_WIDTHS = (1, *WIDTHS)
"""Numbers of rows that a decode step has. One row alone takes the kernels of the first width, and gets the same
numbers, but seven rows less are read from the cache by every block."""
SLICES, GROUP = 8, 2
"""Into how many slices every weight's K is cut, and how many neighbours are added first. The same for all shapes of
blocks, so that a row's numbers do not depend on them."""
LARGE_HEAD, LARGE_HEAD_WIDTH = 192, 32
MIN_DEPTH = 3
"""Chunks that a walking block keeps at least: with two, nothing is on its way while it waits."""
WARPS = 8
"""Warps of a block, about: with 256 threads each may have all registers that it asks for."""
MAX_SHARED = 99 * 1024
"""Shared memory that a block may have on every GPU from sm_80 on."""
RESERVED = 1024
"""Bytes of shared memory that CUDA itself takes of each block."""


class BlockShape(NamedTuple):
    """What is left open about the blocks of the first width. All of them give bitwise the same numbers, so which one a
    weight gets is found by measuring (`layers/matmul_choice.py`)."""

    tiles: int
    """Of 16 rows of the weight, per warp."""
    walks: bool
    """Blocks take one tile after the other: see `walking_source`."""


USUAL = BlockShape(2, walks=False)
SHAPES = (USUAL, BlockShape(1, walks=False), BlockShape(2, walks=True), BlockShape(1, walks=True))


Body = Literal["warps", "walking", "warpgroups", "many rows", "bands", "groups"]
"""How a kernel multiplies: see `small_matmul.Kind.source`."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """A block's warps: `beside` each other, with `tiles` of 16 rows of the weight each, times `along` K. `split` blocks
    share a tile and have a part of K each. `depth` chunks of the weight are kept in shared memory."""

    beside: int
    tiles: int
    along: int
    split: int = 1
    depth: int = 4
    staged: bool = False
    group: int = GROUP
    walks: bool = False
    """Blocks take one tile after the other: see `walking_source`."""
    warpgroups: bool = False
    """Four warps multiply together, from shared memory: see `warpgroup_source`. Then `along` is 1."""

    @property
    def lines(self) -> int:
        """Rows of the weight per block."""
        return 16 * self.tiles * self.beside

    @property
    def threads(self) -> int:
        return 32 * self.beside * self.along

    @property
    def shape_constants(self) -> list[tuple[str, int | bool]]:
        """What every body is told of a block."""
        return [
            ("NW", self.beside),
            ("MT", self.tiles),
            ("KW", self.along),
            ("S", self.split),
            ("Q", self.group),
        ]

    @property
    def constants(self) -> list[tuple[str, int | bool]]:
        return [*self.shape_constants, ("DEPTH", self.depth), ("STAGED", self.staged)]

    @property
    def partial_sums(self) -> int:
        """How many sums of each number are handed over by the blocks that share a tile."""
        return self.split if self.warpgroups else self.split * self.along // self.group

    def stage_bytes(self, width: int) -> int:
        if self.warpgroups:
            return (self.lines + width) * 128
        return self.threads * self.tiles * 64 + (self.along * width * 128 if self.staged else 0)

    def shared_bytes(self, width: int) -> int:
        """For the chunks, where the sums of the warps lie later; behind them if the next tile's are on their way."""
        chunks, sums = self.depth * self.stage_bytes(width), self.along * width * (self.lines + 1) * 4
        if self.warpgroups:
            return max(chunks, sums) + warpgroup_source.PIECE
        return chunks + sums if self.walks else max(chunks, sums)

    def partial_floats(self, width: int) -> int:
        """Of all blocks that share a tile."""
        return self.partial_sums * width * (self.lines + 1)

    @property
    def body(self) -> Body:
        """Which source multiplies."""
        return "warpgroups" if self.warpgroups else "walking" if self.walks else "warps"

    def blocks(self, tiles: int, width: int) -> int:
        """How many blocks are launched for so many tiles."""
        if not self.walks:
            return tiles * self.split
        return min(tiles, resident(self.shared_bytes(width)) * multiprocessors())


def width_of(rows: int, head: int = 0) -> int:
    """The width of the kernel for some rows. Large heads have no more than 32, as the sums would not fit."""
    most = WIDTHS[-1] if head <= LARGE_HEAD else LARGE_HEAD_WIDTH
    return next((width for width in WIDTHS if rows <= width), most) if rows <= most else most


def head_shape(size: int) -> tuple[int, int] | None:
    """Warps beside each other and tiles per warp that are one head; None if that is not possible."""
    shapes = ((beside, size // (16 * beside)) for beside in (4, 3, 2, 1) if size % (16 * beside) == 0)
    return next((shape for shape in shapes if shape[1] <= 4), None)


def most_shared(outputs: int) -> int:
    """How many counters a weight needs at most: for tiles of 32 rows and four bands."""
    return -(-outputs // 32) * 4


GROUP_LINES = 64
"""Rows of the weight that four warps multiply together."""
MOST_PARTS = 4
"""Blocks that share a tile, at most: what they hand over is read by one of them."""
PER_MULTIPROCESSOR = 1.9
"""Blocks that a multiprocessor should have of a weight, at least: one waits for numbers while the other adds up."""

ENOUGH = 0.7
"""Blocks that a multiprocessor should have for many rows, at least."""


@functools.cache
def has_warpgroups() -> bool:
    """True for sm_90: the instructions are of that architecture alone."""
    info = mx.device_info()
    return int(info.get("compute_capability_major", 0)) == 9


def parts_of(outputs: int) -> int:
    """How many blocks share a tile, by the outputs of a weight alone: so a row's numbers depend on nothing else."""
    tiles, parts = -(-outputs // GROUP_LINES), 1
    while parts < MOST_PARTS and tiles * parts < PER_MULTIPROCESSOR * multiprocessors():
        parts *= 2
    return parts


def many_width(rows: int) -> int:
    """The width of the kernel in warp groups for the rows of a decode step of more than `WIDTHS[-1]` rows."""
    return next(width for width in MANY_WIDTHS if rows <= width)


def head_takes_many(size: int) -> bool:
    """True if heads of this size can be tiles for many rows: with larger ones, the sums need too many registers."""
    return size in (GROUP_LINES, 2 * GROUP_LINES)


def head_in_warpgroups(size: int) -> bool:
    """True if a head of this size can be a tile of warp groups, or be cut into such tiles."""
    return size in (GROUP_LINES, 2 * GROUP_LINES, 4 * GROUP_LINES)


def in_warpgroups(width: int, outputs: int, head: int = 0, within: int = 0) -> Tiling:
    """The tiling for a weight whose numbers multiply in warp groups; with `head`, tiles are heads of that size, and
    parts of heads with `within`."""
    parts, lines = parts_of(outputs), head or GROUP_LINES
    # Every block reads all rows: with twice the lines, half as often. There must be enough blocks still.
    if not head and (not within or within % (2 * lines) == 0):
        lines *= 1 + (outputs * parts >= PER_MULTIPROCESSOR * lines * multiprocessors())
    return _grouped(width, lines, parts, -(-outputs // lines) * parts)


def for_many(rows: int, outputs: int, head: int = 0, within: int = 0) -> tuple[int, Tiling]:
    """The width and the tiling for a decode step of many rows. Parts of many rows are long in adding up: blocks share
    the rows before they share a tile, as long as there are about as many as the GPU runs at once."""
    enough, lines = ENOUGH * multiprocessors(), head or GROUP_LINES
    if not head and (not within or within % (2 * lines) == 0):
        lines *= 1 + (-(-outputs // (2 * lines)) >= enough)
    tiles, widths = -(-outputs // lines), (many_width(rows), *reversed((WIDTHS[-1], *MANY_WIDTHS[:-1])))
    choices = [(parts, width) for parts in (1, 2) for width in widths if width <= widths[0]]
    blocks = {choice: tiles * -(-rows // choice[1]) * choice[0] for choice in choices}
    parts, width = next((choice for choice in choices if blocks[choice] >= enough), choices[-1])
    return width, _grouped(width, lines, parts, blocks[parts, width])


def _grouped(width: int, lines: int, parts: int, blocks: int) -> Tiling:
    """A tiling in warp groups, as deep as the shared memory allows for so many blocks."""
    tiling = Tiling(lines // 16, 1, 1, parts, group=1, warpgroups=True)
    room = shared_limit() if blocks <= multiprocessors() else (shared_limit() + RESERVED) // 2 - RESERVED
    room -= warpgroup_source.PIECE
    return dataclasses.replace(tiling, depth=min(8, max(MIN_DEPTH, room // tiling.stage_bytes(width))))


@functools.cache
def shared_limit() -> int:
    """The bytes of shared memory that a block may have: they follow from the compute capability."""
    info = mx.device_info()
    capability = int(info.get("compute_capability_major", 0)), int(info.get("compute_capability_minor", 0))
    return {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}.get(capability, MAX_SHARED)


def resident(shared: int) -> int:
    """How many blocks with so much shared memory a multiprocessor runs at once: at most two, which is enough to have
    one read while the other adds up."""
    return max(1, min(2, (shared_limit() + RESERVED) // (shared + RESERVED)))


def with_depth(tiling: Tiling, width: int) -> Tiling:
    """As deep as half of the shared memory of a large GPU allows, within what each of them has."""
    depth = min(8, max(2, MAX_SHARED // tiling.stage_bytes(width)))
    return Tiling(tiling.beside, tiling.tiles, tiling.along, tiling.split, depth, tiling.staged, tiling.group)


def walking_depth(tiling: Tiling) -> int:
    """How many chunks a walking block keeps: two such blocks share a multiprocessor, where it has the memory."""
    width, all_of_it = WIDTHS[0], shared_limit()
    room = (all_of_it + RESERVED) // 2 - RESERVED if all_of_it > MAX_SHARED else all_of_it
    sums = tiling.shared_bytes(width) - tiling.depth * tiling.stage_bytes(width)
    return min(8, (room - sums) // tiling.stage_bytes(width))


def for_few_rows(shape: BlockShape) -> Tiling:
    """The tiling of the first width, without heads. A block that has too little memory to walk does not."""
    tiling = Tiling(1, shape.tiles, SLICES, walks=True)
    if shape.walks and (depth := walking_depth(tiling)) >= MIN_DEPTH:
        return dataclasses.replace(tiling, depth=depth)
    return with_depth(Tiling(1, shape.tiles, SLICES), WIDTHS[0])


def choose(width: int, *, head: int, shared: bool, shape: BlockShape = USUAL) -> Tiling:
    """The tiling for a width; with `head` its tiles are heads of that size. `shared`: blocks may share a tile, which
    tiles of whole heads need: there are too few of them for a large GPU. `shape`: of the first width, without heads."""
    if not head and width == WIDTHS[0]:
        return for_few_rows(shape)
    if not head:
        return with_depth(Tiling(1, 2, SLICES), width)
    whole_head = head_shape(head)
    assert whole_head is not None, "`fits_heads` was asked"
    beside, tiles = whole_head
    along = 1 if tiles > 2 else max(GROUP, WARPS // beside // GROUP * GROUP)
    split = SLICES // along if shared else 1
    staged = beside > 1 and width > 8
    return with_depth(Tiling(beside, tiles, along, split, staged=staged, group=min(GROUP, along)), width)
