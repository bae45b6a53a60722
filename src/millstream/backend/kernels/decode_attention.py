"""Decode attention as a CUDA kernel: one or several queries per row, over rows of unequal length wherever their tokens
are.

MLX's CUDA build has no fused kernel for it: with an array mask it falls back to seven launches per layer. This is one,
or two for long rows, for all slabs together: it reads them by address, so a launch does not name every slab. It also
writes the step's keys and values, in place: MLX would copy a whole slab whenever the device still reads it, which is
always, since the device is one step behind.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.kernels import decode_dense_source as dense_source
from millstream.backend.kernels import decode_packed_source as packed_source
from millstream.backend.kernels import decode_source as source
from millstream.backend.kernels.compiled import cuda_kernel

WARPS = 8
"""Of a block that has no tensor cores."""
REGISTERS = 65536
"""Of a multiprocessor of every GPU so far."""
SOME_REGISTERS = 56
STAGE_BYTES = 32 * 1024
"""Of a block, on their way. Several blocks are on a multiprocessor at a time, so this is enough; and the fewer bytes a
block has, the more blocks there are."""
_INPUTS = ("q", "new_k", "new_v", "items", "lengths", "addresses", "layer", "counters", "sinks")
SPAN, SHORTEST_SPAN = 512, 128
"""Columns per part, about: see `spans`."""
PART_BYTES = 128 * 1024
"""Of one head, in a part, if a token has MANY_HEADS: with fewer, parts are smaller, since each is a block, and blocks
are what fills a GPU."""
MANY_HEADS = 8
HEAD_SIZES = (64, 96, 128, 192, 256)

MOST_QUERIES = 16
"""Of a block: its heads times its tokens. Other tokens of a row are other blocks."""
MOST_CHUNKS = 17
"""How many blocks the tokens of a row may need."""

ITEM = 12
"""Integers of a work item:

0. row; -1: nothing to do (padding)
1. slab; -1: the row has no tokens, its output is zero
2. slot
3. capacity of the slot
4. first column, and
5. the column after the last one
6. tokens of the row before column 0
7. 1 if the row's new tokens are written here; 0 for tokens that rows share, of which all columns are read
8. window: 0 for full attention. Otherwise the slot is a ring, in which the token with number p from column 0 on stands
   in column p modulo capacity, and a query sees the last `window` tokens, itself included. A slot that is shorter than
   the window works as a ring that never wraps
9. the row's first item
10. how many items the row has, which follow each other
11. columns of each of the row's items but the last one, if the row shares no tokens; else 0
"""


def span_for(groups: int, token_bytes: int) -> int:
    """How many columns of a layer a part should have. `token_bytes`: of one token in one of its key-value heads."""
    columns = PART_BYTES * min(groups, MANY_HEADS) // MANY_HEADS // token_bytes
    return max(SHORTEST_SPAN, min(SPAN, columns // 32 * 32))


def spans(capacity: int, span: int = SPAN) -> list[tuple[int, int]]:
    """The columns of a slot, in parts for work items. Where they begin depends on nothing but `span`, so a row gets the
    same numbers whatever else is in the batch, and in whatever slot it is."""
    return [(first, min(capacity, first + span)) for first in range(0, capacity, span)]


_JOIN = """
  const int parts = sums_shape[1], d = threadIdx.x;
  const float* from = sums + (size_t)blockIdx.x * parts * (D + 2);
  float top = -1e30f, over = 0.f, under = 0.f;
  for (int p = 0; p < parts; p++) top = fmaxf(top, from[p * (D + 2) + D + 1]);
  for (int p = 0; p < parts; p++) {
    const float weight = __expf(from[p * (D + 2) + D + 1] - top);
    over += weight * from[p * (D + 2) + d];
    under += weight * from[p * (D + 2) + D];
  }
  out[(size_t)blockIdx.x * D + d] = T(under > 0.f ? over / under : 0.f);
"""


def float_bits(value: float) -> int:
    """The bits of a float32 as an integer: a kernel's template takes no other numbers."""
    bits: int = struct.unpack("i", struct.pack("f", value))[0]
    return bits


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """What the launches of a step read, for all layers of one kind."""

    items: mx.array
    """Work items, sorted by row, (items, ITEM)."""
    parted: bool
    """True if a row may have several items; otherwise item number n is row number n."""
    addresses: mx.array
    """(slabs, layers, parts): where the keys and the values of a layer begin; of a quantised KV cache, the packed
    numbers, scales and biases of the keys, then of the values."""
    lengths: mx.array
    """Tokens of each row before this step."""
    counters: mx.array
    """If `parted`: a zero for each chunk of queries, row and key-value head, by which the parts of a row find out which
    is the last one. A launch leaves zeros behind."""
    count: int = 1
    """Tokens of each row in this step. Queries, keys and values are flat: token j of row n is row n * count + j of
    them, as far as there are so many."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the numbers of a quantised KV cache are packed: MLX's affine form."""

    bits: int
    group_size: int


def decode_fits(queries: mx.array, keys: mx.array, values: mx.array, packing: Packing | None = None) -> bool:
    """True for the shapes that the kernel is written for: one of the known head sizes, groups that fit its registers,
    half precision if keys and values are packed."""
    heads, _, size = queries.shape[1:]
    fits = size == values.shape[-1] and size in HEAD_SIZES and heads // keys.shape[1] <= MOST_QUERIES
    return fits and (packing is None or (queries.dtype in (mx.bfloat16, mx.float16) and size % 64 == 0))


def slab_decode(
    queries: mx.array,
    new: tuple[mx.array, mx.array],
    work: DecodeWork,
    layer: mx.array,
    scale: float,
    *,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    packing: Packing | None = None,
) -> mx.array:
    """Attention of `queries`, (flat rows, heads, 1, size), over the tokens of each row. The keys and values in `new`,
    (flat rows, groups, 1, size), are written to the slabs first, as the next tokens of each row; a query sees those
    before it and its own. `sinks`: a logit per head that takes weight and gives nothing. `softcap`: scores become
    cap * tanh(score / cap)."""
    attend = _attention(work.parted, work.count, scale, softcap, packing)
    rest = () if sinks is None else (sinks,)
    out: mx.array = attend(queries, *new, work.items, work.lengths, work.addresses, layer, work.counters, *rest)
    return out


@functools.cache
def _attention(parted: bool, count: int, scale: float, softcap: float | None, packing: Packing | None) -> Any:
    """Compiled: else the kernel's source would be assembled at every call, which takes longer than the rest."""
    return mx.compile(functools.partial(_launch, parted, count, scale, softcap, packing))


def chunks_of(count: int, share: int) -> tuple[int, int]:
    """In how many chunks the tokens of a row are computed, and how many tokens each has. `share`: heads of a group."""
    chunks = -(-count // max(1, MOST_QUERIES // share))
    return chunks, -(-count // chunks)


def _launch(
    parted: bool,
    count: int,
    scale: float,
    softcap: float | None,
    packing: Packing | None,
    queries: mx.array,
    *rest: mx.array,
) -> mx.array:
    _, heads, _, size = queries.shape
    groups, items = rest[0].shape[1], rest[2].shape[0]
    sinks = len(rest) == len(_INPUTS) - 1
    chunks, tokens = chunks_of(count, heads // groups)
    assert chunks <= MOST_CHUNKS, "more tokens per row than counters"
    form = _form(queries.dtype, size, heads // groups * tokens, packing, count)
    (out, _) = _kernel(form)(
        inputs=[queries, *rest] if sinks else [queries, *rest, queries],
        output_shapes=[queries.shape, (chunks * items, groups, form.queries, size + 4) if parted else (1,)],
        output_dtypes=[queries.dtype, mx.float32],
        grid=(form.warps * 32 * items, groups, chunks),
        threadgroup=(form.warps * 32, 1, 1),
        template=[
            ("T", queries.dtype),
            ("D", size),
            ("GQ", form.queries),
            ("Q", count),
            ("QC", tokens),
            ("W", form.warps),
            ("DEPTH", form.depth),
            ("BITS", packing.bits if packing is not None else 0),
            ("SINKS", sinks),
            ("CAP", float_bits(softcap or 0.0)),
            ("SCALE", float_bits(scale)),
        ],
    )
    return out  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Form:
    """How the kernel is built for some shape."""

    kind: str | None
    """The type that the mma multiplies, in its words; None if there is no mma."""
    packed: bool
    queries: int
    """Of a group: heads that share keys and values, times tokens."""
    warps: int
    depth: int
    """Tiles of a warp that are on their way, and the one that it works on."""
    shared_bytes: int
    blocks: int
    """At a time on a multiprocessor: so few registers does a thread get."""

    @property
    def header(self) -> str:
        words = {"KIND": self.kind or "f16", "THREADS": str(self.warps * 32), "BLOCKS": str(self.blocks)}
        return functools.reduce(lambda text, word: text.replace(word, words[word]), words, source.HEADER)

    @property
    def source(self) -> str:
        if self.kind is None:
            middle = source.PLACE + dense_source.WRITE + dense_source.SCALAR_LOOP
        elif self.packed:
            middle = packed_source.QUERY + source.PLACE + packed_source.WRITE + source.TILES + packed_source.LOOP
            middle += source.STORE_TILES
        else:
            middle = dense_source.QUERY + source.PLACE + dense_source.WRITE + source.TILES + dense_source.LOOP
            middle += source.STORE_TILES
        return source.BEGIN + middle + source.END


def _form(dtype: mx.Dtype, size: int, queries: int, packing: Packing | None, count: int = 1) -> _Form:
    """How many tiles are on their way, and with how many warps: about as many bytes for all shapes, and several blocks
    at a time on a multiprocessor, since a block also waits, at its begin and at its end. Of all this only the number of
    warps changes a result, and it depends on the shape alone."""
    kind = "f16" if packing is not None else {mx.float16: "f16", mx.bfloat16: "bf16"}.get(dtype)
    if kind is None:
        # The sums of all warps must fit.
        warps = min(WARPS, max(1, 40_000 // (4 * queries * size)))
        depth, tile = 1, 0
    else:
        tile = 16 * size * 4 if packing is None else 16 * (size * packing.bits // 4 + size // 64 * 16)
        warps = 4 if tile <= 8192 else 2
        depth = max(1 if packing is None else 2, STAGE_BYTES // (warps * tile))
    sums = warps * queries * (size + 6) * 4
    fresh = 0 if packing is None else 2 * count * (size * packing.bits // 8 + size // 16)
    shared_bytes = max(depth * warps * tile + fresh, sums)
    # Of a thread: what it holds of the sums and the queries, and the rest.
    registers = SOME_REGISTERS + -(-queries // 8) * size * 3 // 8
    blocks = max(1, REGISTERS // (warps * 32 * registers))
    return _Form(kind, packing is not None, queries, warps, depth, shared_bytes, blocks if kind is not None else 1)


@functools.cache
def _kernel(form: _Form) -> Any:
    return cuda_kernel(
        name="millstream_decode",
        input_names=list(_INPUTS),
        output_names=["out", "sums"],
        source=form.source,
        header=form.header,
        shared_memory=form.shared_bytes,
    )


@functools.cache
def _join_kernel() -> Any:
    return cuda_kernel(name="millstream_join_parts", input_names=["sums"], output_names=["out"], source=_JOIN)


def join_parts(sums: mx.array, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Attention of `shape` from its parts, (…, parts, size + 2): sums, their weight, the greatest score."""
    size = shape[-1]
    (out,) = _join_kernel()(
        inputs=[sums.reshape(-1, *sums.shape[-2:])],
        output_shapes=[shape],
        output_dtypes=[dtype],
        grid=(math.prod(shape), 1, 1),
        threadgroup=(size, 1, 1),
        template=[("T", dtype), ("D", size)],
    )
    result: mx.array = out
    return result
