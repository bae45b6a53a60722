"""Small-batch matmuls as CUDA kernels: x @ w.T for the few rows of a decode step, with what stands before and after.

MLX has cuBLAS compute such a matmul inside a captured graph, which costs the host 18 us (H200); one of these kernels
costs 5. A decode step on a large GPU waits for its host, or for its weights. `matmul_source` says how they work;
`matmul_tilings` chooses the shape of a block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from millstream.backend.kernels import (
    matmul_source,
    matmul_tilings,
    matmul_tuning,
    packed_bands,
    packed_groups,
    packed_source,
    packed_tilings,
    walking_source,
    warpgroup_source,
)
from millstream.backend.kernels.compiled import cuda_kernel
from millstream.backend.kernels.matmul_tilings import MANY_WIDTHS, STEP_WIDTHS, WIDTHS, Body, Tiling
from millstream.backend.kernels.matmul_tuning import Role
from millstream.backend.kernels.unpack_cuda import unpack_source
from millstream.backend.kernels.weights import Dense, Norm, Packed, Weight, as_weight

__all__ = [
    "STEP_WIDTHS",
    "WIDTHS",
    "fits",
    "fits_heads",
    "glu",
    "matmul",
    "matmul_add",
    "prepare",
    "qkv_rope",
    "supported_here",
]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kernel but for the shape of its blocks. `constants` are written into its source as macros."""

    name: str
    inputs: tuple[str, ...]
    epilogue: str
    outputs: tuple[str, ...] = ("out",)
    constants: tuple[tuple[str, str], ...] = ()
    lines: str = matmul_source.LINES
    """Which rows of the weight a tile has."""

    def source(self, split: bool, body: Body) -> str:
        given = dict(self.constants)
        flags = {"NORM": "0", "BIAS": "0", "HEAD_NORM": "0", "ROPE": "0"} | given
        walks = body == "walking"
        flags["WALKS"] = str(int(walks))
        packed = "scales" in self.inputs
        if packed:
            affine = "zeros" in self.inputs
            flags |= {"ZEROS": "zeros" if affine else "scales"}
            flags |= {"RAW_SCALE": "unsigned short" if affine else "unsigned char"}
            flags |= {"ALL_SCALES": "(i < WIDE ? scales : zeros)" if affine else "scales"}
        parts = [f"#define {name} {value}\n" for name, value in flags.items()]
        parts += [matmul_source.SETUP, self.lines, matmul_source.WARM]
        end = matmul_source.SHARED if split else matmul_source.WHOLE
        if packed:
            parts += self._packed(split, body)
        elif body == "walking":
            parts += [walking_source.DENSE_START, walking_source.LOOP, walking_source.DENSE_PRODUCT]
            parts += [matmul_source.SUM_WARPS, end]
        elif body == "warpgroups":
            parts += [warpgroup_source.PRODUCT, *_group_sums(split)]
        else:
            parts += [matmul_source.PRODUCT, matmul_source.SUM_WARPS, end]
        return "".join([*parts, matmul_source.ROUND, self.epilogue, walking_source.END if walks else ""])

    def _packed(self, split: bool, body: Body) -> list[str]:
        if body == "bands":
            end = matmul_source.SHARED if split else matmul_source.WHOLE
            return [packed_bands.PRODUCT, matmul_source.SUM_WARPS, end]
        if body == "groups":
            return [packed_groups.PRODUCT, *_group_sums(split)]
        if body == "many rows":
            end = packed_source.MANY_SHARED if split else packed_source.MANY_WHOLE
            return [packed_source.UNITS, packed_source.MANY_PRODUCT, end]
        loop = walking_source.LOOP if body == "walking" else ""
        parts = [packed_source.UNITS, packed_source.FEW_START, loop, packed_source.FEW_PRODUCT]
        return [*parts, matmul_source.SUM_WARPS, matmul_source.SHARED if split else matmul_source.WHOLE]


def _group_sums(split: bool) -> list[str]:
    return [warpgroup_source.SUMS, warpgroup_source.SHARED if split else warpgroup_source.WHOLE]


@dataclass(slots=True)
class _Call:
    """Collects what a kernel is called with."""

    inputs: dict[str, mx.array] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, array: mx.array | None, constant: str | None = None, value: str = "1") -> None:
        """One more input, if there is one, and the macro that tells the source of it."""
        if array is not None:
            self.inputs[name] = array
            if constant is not None:
                self.constants[constant] = value


@functools.cache
def _kernel(kind: Kind, dtype: mx.Dtype, shared: int, split: bool, body: Body) -> Any:
    packed = packed_source.HEADER + packed_bands.HEADER + unpack_source(dtype) if "scales" in kind.inputs else ""
    half = dtype == mx.float16
    more = warpgroup_source.header(half, (*WIDTHS, *MANY_WIDTHS)) if body == "warpgroups" else packed
    if body == "groups":
        more += warpgroup_source.header(half, ()) + packed_groups.header(half)
    return cuda_kernel(
        name=f"millstream_{'packed_' if packed else ''}{kind.name}",
        input_names=[*kind.inputs, *(["tickets"] if split else [])],
        output_names=[*kind.outputs, *(["partial"] if split else [])],
        source=kind.source(split, body),
        header=matmul_source.header(half) + more,
        shared_memory=shared,
    )


def run(
    kind: Kind,
    tiling: Tiling,
    width: int,
    weight: Weight,
    inputs: Sequence[mx.array],
    shapes: Sequence[tuple[int, ...]],
    heads: tuple[tuple[str, int], ...] = (),
) -> list[mx.array]:
    """Launch a kernel. `inputs` begin with x and the weight; the result has an array for each of `shapes`."""
    x, split = inputs[0], tiling.split > 1
    tiles = -(-weight.outputs // tiling.lines)
    bands = -(-x.shape[0] // width)
    shapes, dtypes = list(shapes), [x.dtype] * len(shapes)
    inputs = list(inputs)
    if split:
        assert weight.tickets is not None and weight.tickets.shape[0] >= tiles * bands, "the weight was prepared"
        inputs.append(weight.tickets)
        shapes.append((tiles * bands * tiling.partial_floats(width),))
        dtypes.append(mx.float32)
    assert bands == 1 or not tiling.walks, "a walking block has one band"
    made: list[mx.array] = _kernel(kind, x.dtype, tiling.shared_bytes(width), split, tiling.body)(
        inputs=inputs,
        output_shapes=shapes,
        output_dtypes=dtypes,
        grid=(tiling.blocks(tiles * bands, width) * tiling.threads, 1, 1),
        threadgroup=(tiling.threads, 1, 1),
        template=[("T", x.dtype), ("ROWS", width), *tiling.constants, *heads],
    )
    return made[: len(made) - split]


def supported_here() -> bool:
    """True from sm_80 on, which brought the instructions that the kernels use."""
    return int(mx.device_info().get("compute_capability_major", 0)) >= 8


def fits(weight: Weight | mx.array) -> bool:
    """True if the kernels can take this weight."""
    weight = as_weight(weight)
    if isinstance(weight, Packed):
        return packed_tilings.fits(weight)
    if weight.weight.dtype not in (mx.bfloat16, mx.float16):
        return False
    return weight.inputs % 64 == 0 and weight.outputs % 2 == 0


def fits_heads(size: int) -> bool:
    """True if `qkv_rope` can take heads of this size: one is a tile."""
    return matmul_tilings.head_shape(size) is not None


def prepare(weight: Weight | mx.array) -> Weight:
    """The weight with counters for blocks that share a tile."""
    weight = as_weight(weight)
    if weight.tickets is not None:
        return weight
    tickets = mx.zeros((matmul_tilings.most_shared(weight.outputs),), dtype=mx.uint32)
    return dataclasses.replace(weight, tickets=tickets)


def in_warpgroups(weight: Weight, head: int = 0) -> bool:
    """True if a weight's numbers multiply in warp groups: at every width then, so that a row always gets the same."""
    return _can_group(weight, head) and isinstance(weight, Dense) and matmul_tuning.takes_warpgroups(weight)


def takes_many(weight: Weight, head: int = 0) -> bool:
    """True if the kernels take a decode step of more than `WIDTHS[-1]` rows at once. They do so in warp groups,
    whatever fewer rows take: in a step of so many a row gets other numbers anyway."""
    return _can_group(weight, head) and (not head or matmul_tilings.head_takes_many(head))


def _can_group(weight: Weight, head: int) -> bool:
    if not isinstance(weight, Dense) or not matmul_tilings.has_warpgroups():
        return False
    if head and not matmul_tilings.head_in_warpgroups(head):
        return False
    return weight.tickets is not None or matmul_tilings.parts_of(weight.outputs) == 1


def _in_groups(weight: Packed, rows: int, head: int, within: int) -> bool:
    """There are counters for steps and what stands for them; wider passes may take another body."""
    countable = rows <= matmul_tilings.MOST_ROWS or packed_groups.parts_of(weight) == 1
    return countable and matmul_tuning.in_groups(weight, rows) and packed_groups.takes(head, within)


def _call(x: mx.array, weight: Weight, bias: mx.array | None, norm: Norm | None) -> _Call:
    """The inputs that every kernel may have."""
    call = _Call()
    fused = norm is not None and x.dtype == mx.bfloat16
    if norm is not None and not fused:
        # x times the norm's weight may be too large for float16.
        x = mx.fast.rms_norm(x, norm.weight, norm.eps)
    call.add("x", x)
    if isinstance(weight, Packed):
        call.add("w", weight.packed)
        call.add("scales", weight.scales)
        call.add("zeros", weight.biases)
    else:
        call.add("w", weight.weight)
    call.add("bias", bias, "BIAS")
    if norm is not None and fused:
        call.add("norm", norm.weight, "NORM")
        call.constants["EPS"] = f"{norm.eps!r}f"
    return call


def _run(
    name: Role,
    call: _Call,
    weight: Weight,
    epilogue: str,
    shapes: Sequence[tuple[int, ...]],
    outputs: tuple[str, ...] = ("out",),
    heads: tuple[tuple[str, int], ...] = (),
    head: int = 0,
    lines: str = matmul_source.LINES,
    within: int = 0,
) -> list[mx.array]:
    """`head`: a tile is a head of this size. `within`: tiles are parts of heads of this size."""
    kind = Kind(name, tuple(call.inputs), epilogue, outputs, tuple(sorted(call.constants.items())), lines)
    rows = call.inputs["x"].shape[0]
    width = matmul_tilings.width_of(rows, head)
    shape = matmul_tuning.block_shape(weight)
    tiling: Tiling
    if matmul_tuning.is_many(rows) and takes_many(weight, head or within):
        width, tiling = matmul_tilings.for_many(rows, weight.outputs, head, within)
    elif in_warpgroups(weight, head or within):
        width = matmul_tilings.width_of(rows)
        tiling = matmul_tilings.in_warpgroups(width, weight.outputs, head, within)
    elif isinstance(weight, Packed) and _in_groups(weight, rows, head, within):
        width = packed_groups.width_of(rows)
        tiling = packed_groups.in_groups(weight, width, head=head, within=within)
    elif isinstance(weight, Packed):
        banded = None
        if matmul_tuning.choice_width(rows) > WIDTHS[0]:
            banded = packed_bands.in_bands(weight, packed_bands.MAX_WIDTH, head=head, within=within)
        if banded is not None:
            width, tiling = packed_bands.MAX_WIDTH, banded
        else:
            tiling = packed_tilings.choose(weight, width, -(-rows // width), head=head, within=within, shape=shape)
    else:
        tiling = matmul_tilings.choose(width, head=head, shared=weight.tickets is not None, shape=shape)
    return run(kind, tiling, width, weight, list(call.inputs.values()), shapes, heads)


def matmul(
    x: mx.array,
    weight: Weight | mx.array,
    *,
    bias: mx.array | None = None,
    norm: Norm | None = None,
) -> mx.array:
    """norm(x) @ weight.T + bias for x of (rows, 1, size)."""
    weight = as_weight(weight)
    call = _call(x, weight, bias, norm)
    return _run("matmul", call, weight, matmul_source.STORE, [(*x.shape[:-1], weight.outputs)])[0]


def matmul_add(
    x: mx.array,
    weight: Weight | mx.array,
    residual: mx.array,
    *,
    bias: mx.array | None = None,
    norm: Norm | None = None,
    factor: float = 1.0,
) -> mx.array:
    """residual + factor * (norm(x) @ weight.T + bias)"""
    weight = as_weight(weight)
    call = _call(x, weight, bias, norm)
    call.add("r", residual, "FACTOR", f"{float(factor)!r}f")
    return _run("matmul_add", call, weight, matmul_source.ADD, [(*x.shape[:-1], weight.outputs)])[0]


def glu(
    x: mx.array,
    weight: Weight | mx.array,
    *,
    activation: str = "silu",
    bias: mx.array | None = None,
    norm: Norm | None = None,
) -> mx.array:
    """activation(gate) * up, where the first half of the weight's rows gives the gate."""
    weight = as_weight(weight)
    call = _call(x, weight, bias, norm)
    call.constants["ACTIVATED"] = matmul_source.ACTIVATED[activation]
    shapes, lines = [(*x.shape[:-1], weight.outputs // 2)], matmul_source.HALVED_LINES
    return _run("glu", call, weight, matmul_source.GLU, shapes, lines=lines)[0]


def qkv_rope(
    x: mx.array,
    weight: Weight | mx.array,
    offset: mx.array,
    periods: mx.array | None,
    heads: int,
    groups: int,
    size: int,
    *,
    bias: mx.array | None = None,
    norm: Norm | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    factor: float = 1.0,
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of (rows, heads or groups, 1, size); norms of heads and RoPE for the first two."""
    weight = as_weight(weight)
    call = _call(x, weight, bias, norm)
    if q_norm is not None and k_norm is not None:
        call.add("q_norm", q_norm.weight, "HEAD_NORM")
        call.add("k_norm", k_norm.weight)
        call.constants |= {"Q_EPS": f"{q_norm.eps!r}f", "K_EPS": f"{k_norm.eps!r}f"}
    else:
        assert q_norm is None and k_norm is None, "both or none"
    if periods is not None:
        call.add("offset", offset, "ROPE")
        call.add("periods", periods)
        call.constants["TURNED(v)"] = "(v)" if factor == 1.0 else f"float(T((v) * {float(factor)!r}f))"
    rows = x.shape[0]
    shapes = [(rows, heads, 1, size), (rows, groups, 1, size), (rows, groups, 1, size)]
    counts = (("H", heads), ("KV", groups), ("D", size))
    outputs = ("q", "keys", "values")
    turned = size if periods is None else 2 * periods.shape[0]
    if q_norm is None and turned == size and size % 32 == 0:
        epilogue, lines = matmul_source.QKV_PAIRS, matmul_source.PAIRED_LINES
        made = _run("qkv_rope", call, weight, epilogue, shapes, outputs, counts, lines=lines, within=size)
    else:
        made = _run("qkv_rope", call, weight, matmul_source.QKV, shapes, outputs, counts, size)
    return made[0], made[1], made[2]
