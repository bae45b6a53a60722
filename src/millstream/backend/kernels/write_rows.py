"""CUDA kernels that write to slabs in place: rows that join a batch, and rows that move to another slot.

MLX copies a whole buffer to change a part of it while the device still reads it: gigabytes with rows of 8,000 tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from millstream.backend.kernels.compiled import cuda_kernel

THREADS = 256
PLACE = 4
"""Integers of a row that is written: its slot, the first column of `rows` to take, how many, and their first column in
the slot."""
SOURCES = 32
"""Arrays that one launch of `join_rows` reads. With their strides they are most of the 4 KiB that a launch may pass."""
JOIN = 8
"""Integers of a row that joins: slab, slot and capacity of its target, its row in the sources, the first column there,
how many, their first column in the slot, and nothing."""
ADDRESSES = 12
"""Arrays whose addresses one launch finds: two layers of a quantised KV cache. So one kernel is compiled for all."""
MOVE = 8
"""Integers of a move: slab, slot and capacity of the source, the same of the target, tokens, and nothing."""

# A block copies some tokens of one head of one row, 16 bytes per thread where they are aligned. `part` is an input that
# is written to: MLX does not know it, so the next read of the buffer must be in another evaluation.
_SOURCE = """
  constexpr int V = 16 / sizeof(T);
  const int head = blockIdx.y, row = blockIdx.z, capacity = part_shape[2];
  const int* place = places + (size_t)row * 4;
  const int skipped = place[1], length = place[2], column = place[3];
  const T* from = rows + row * rows_strides[0] + head * rows_strides[1] + skipped * rows_strides[2];
  T* to = const_cast<T*>(part) + ((size_t)place[0] * part_shape[1] + head) * capacity * D;
  const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  if (D % V == 0 && rows_strides[3] == 1 && rows_strides[2] % V == 0 && (size_t)from % 16 == 0) {
    for (int i = first; i < length * (D / V); i += stride) {
      const int token = i / (D / V), at = i % (D / V) * V;
      const int target = token + column < capacity ? token + column : token + column - capacity;
      *(uint4*)(to + (size_t)target * D + at) = *(const uint4*)(from + token * rows_strides[2] + at);
    }
  } else {
    for (int i = first; i < length * D; i += stride) {
      const int token = i / D, at = i % D;
      const int target = token + column < capacity ? token + column : token + column - capacity;
      to[(size_t)target * D + at] = from[token * rows_strides[2] + at * rows_strides[3]];
    }
  }
  if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x == 0) out[0] = 1;
"""

# One block per head of a part of a layer and row. Parts may be of several sizes: `widths` has the bytes of a token.
_MOVE = """
  const int head = blockIdx.x % HEADS, part = blockIdx.x / HEADS;
  const size_t parts = (size_t)addresses_shape[1] * addresses_shape[2], width = widths[part];
  const int* move = moves + (size_t)blockIdx.y * 8;
  const long long* base = (const long long*)addresses + part;
  const char* from = (const char*)base[move[0] * parts] + ((size_t)move[1] * HEADS + head) * move[2] * width;
  char* to = (char*)base[move[3] * parts] + ((size_t)move[4] * HEADS + head) * move[5] * width;
  const size_t bytes = move[6] * width;
  const size_t wide = (size_t)from % 16 == 0 && (size_t)to % 16 == 0 ? bytes / 16 : 0;
  for (size_t i = threadIdx.x; i < wide; i += blockDim.x) ((uint4*)to)[i] = ((const uint4*)from)[i];
  for (size_t i = wide * 16 + threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
  if (blockIdx.x + blockIdx.y + threadIdx.x == 0) out[0] = 1;
"""


# A block copies some tokens of one head of one array and row. `kinds` has, for each source, its number among the
# addresses of a slab and the size of a token.
_JOIN = """
  const int head = blockIdx.y % HEADS, source = blockIdx.y / HEADS;
  const T* from = 0;
  long long by_row = 0, by_head = 0, by_token = 0, by_element = 0;
  switch (source) {
CASES
  }
  const int* place = places + (size_t)blockIdx.z * 8;
  const int size = kinds[2 * source + 1], capacity = place[2], length = place[5], column = place[6];
  const size_t parts = (size_t)addresses_shape[1] * addresses_shape[2];
  T* to = (T*)(size_t)((const long long*)addresses)[place[0] * parts + kinds[2 * source]];
  to += ((size_t)place[1] * HEADS + head) * capacity * size;
  from += place[3] * by_row + head * by_head + place[4] * by_token;
  constexpr int V = 16 / sizeof(T);
  const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  if (size % V == 0 && by_element == 1 && by_token % V == 0 && (size_t)from % 16 == 0 && (size_t)to % 16 == 0) {
    const int wide = size / V;
    for (int i = first; i < length * wide; i += stride) {
      const int token = i / wide, at = i % wide * V;
      const int target = token + column < capacity ? token + column : token + column - capacity;
      *(uint4*)(to + (size_t)target * size + at) = *(const uint4*)(from + token * by_token + at);
    }
  } else {
    for (int i = first; i < length * size; i += stride) {
      const int token = i / size, at = i % size;
      const int target = token + column < capacity ? token + column : token + column - capacity;
      to[(size_t)target * size + at] = from[token * by_token + at * by_element];
    }
  }
  if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x == 0) out[0] = 1;
"""
_CASE = (
    "    case {n}: from = a{n}; by_row = a{n}_strides[0]; by_head = a{n}_strides[1]; "
    "by_token = a{n}_strides[2]; by_element = a{n}_strides[3]; break;"
)


@functools.cache
def _join_kernel() -> Any:
    cases = "\n".join(_CASE.format(n=number) for number in range(SOURCES))
    return cuda_kernel(
        name="millstream_join_rows",
        input_names=[*(f"a{number}" for number in range(SOURCES)), "places", "kinds", "addresses"],
        output_names=["out"],
        source=_JOIN.replace("CASES", cases),
        ensure_row_contiguous=False,
    )


@functools.cache
def _kernel() -> Any:
    return cuda_kernel(
        name="millstream_write_rows",
        input_names=["part", "rows", "places"],
        output_names=["out"],
        source=_SOURCE,
        ensure_row_contiguous=False,
    )


@functools.cache
def _move_kernel() -> Any:
    return cuda_kernel(
        name="millstream_move_rows", input_names=["moves", "addresses", "widths"], output_names=["out"], source=_MOVE
    )


@functools.cache
def _address_kernel() -> Any:
    lines = [f"  out[{number}] = (long long)(size_t)a{number};" for number in range(ADDRESSES)]
    return cuda_kernel(
        name="millstream_addresses",
        input_names=[f"a{number}" for number in range(ADDRESSES)],
        output_names=["out"],
        source="\n".join(["  if (threadIdx.x) return;", *lines]),
        ensure_row_contiguous=False,
    )


def write_rows(part: mx.array, rows: mx.array, places: mx.array) -> mx.array:
    """Write tokens of `rows`, (count, heads, columns, size), to slots of `part`, (slots, heads, capacity, size).
    `places`: (count, PLACE) 32-bit integers, made once for all layers. A row that reaches the end of its slot goes on
    at the slot's beginning. The result must be evaluated before anything else reads the buffer."""
    count, heads, length, size = rows.shape
    blocks = max(1, min(64, -(-length * size * rows.dtype.size // (16 * THREADS))))
    (out,) = _kernel()(
        inputs=[part, rows, places],
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
        grid=(blocks * THREADS, heads, count),
        threadgroup=(THREADS, 1, 1),
        template=[("T", part.dtype), ("D", size)],
    )
    result: mx.array = out
    return result


def move_rows(moves: Sequence[Sequence[int]], addresses: mx.array, parts: Sequence[mx.array]) -> mx.array:
    """Copy the first tokens of slots to other slots, in all layers: see `MOVE`. `parts`: arrays like those of any slab,
    which have the same number of heads. The result must be evaluated before anything else reads the slabs."""
    heads = parts[0].shape[1]
    widths = tuple(part.shape[3] * part.dtype.size for part in parts)
    (out,) = _move_kernel()(
        inputs=[mx.array(np.array(moves, dtype=np.int32)), addresses, _on_device(widths)],
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
        grid=(len(parts) * heads * THREADS, len(moves), 1),
        threadgroup=(THREADS, 1, 1),
        template=[("HEADS", heads)],
    )
    result: mx.array = out
    return result


@functools.lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...]) -> mx.array:
    made = mx.array(numbers, dtype=mx.int32)
    found = made + 0
    mx.eval(found)
    return found


def join_rows(sources: Sequence[mx.array], places: Sequence[Sequence[int]], addresses: mx.array) -> list[mx.array]:
    """Write tokens of rows to slots of slabs, in all layers: see `JOIN`. `sources`: (rows, heads, columns, size) for
    each part of each layer, in the order of a slab's addresses. A row that reaches the end of its slot goes on at the
    slot's beginning. The results must be evaluated before anything else reads the slabs.

    Sources are inputs, so MLX computes them first and keeps them as long as it takes."""
    shapes = [source.shape for source in sources]
    launches = _launches(
        tuple((source.dtype, shape[1], shape[3]) for source, shape in zip(sources, shapes, strict=True))
    )
    # Powers of four: every other number of rows is traced, and blocks for rows that are not there end at once.
    targets = np.zeros((1 << ((len(places) - 1).bit_length() + 1) // 2 * 2, JOIN), dtype=np.int32)
    targets[: len(places)] = places
    # On the device: what comes from the host is in the host's memory, where all blocks would read it.
    far = mx.array(targets) + 0
    return [_join(kinds, far, addresses, [sources[number] for number in some]) for some, kinds in launches]


@functools.lru_cache(maxsize=16)
def _launches(parts: tuple[tuple[mx.Dtype, int, int], ...]) -> list[tuple[list[int], mx.array]]:
    """The sources of each launch, and what it is told of them. `parts`: type, heads and size of each source."""
    alike: dict[tuple[mx.Dtype, int], list[int]] = {}
    for number, (dtype, heads, _) in enumerate(parts):
        alike.setdefault((dtype, heads), []).append(number)
    split = [
        numbers[first : first + SOURCES] for numbers in alike.values() for first in range(0, len(numbers), SOURCES)
    ]
    return [(some, _kinds(tuple((number, parts[number][2]) for number in some))) for some in split]


def _kinds(kinds: tuple[tuple[int, int], ...]) -> mx.array:
    return _on_device(tuple(each for kind in kinds for each in kind))


def _launch_join(kinds: mx.array, places: mx.array, addresses: mx.array, sources: list[mx.array]) -> mx.array:
    dtype, heads = sources[0].dtype, sources[0].shape[1]
    rows = max(places.shape[0], sources[0].shape[0])
    tokens = max(source.shape[0] * source.shape[2] * source.shape[3] for source in sources) * dtype.size // rows
    blocks = max(1, min(64, -(-tokens // (16 * THREADS))))
    (out,) = _join_kernel()(
        inputs=[*itertools.islice(itertools.cycle(sources), SOURCES), places, kinds, addresses],
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
        grid=(blocks * THREADS, heads * len(sources), places.shape[0]),
        threadgroup=(THREADS, 1, 1),
        template=[("T", dtype), ("HEADS", heads)],
    )
    result: mx.array = out
    return result


_join = mx.compile(_launch_join)
"""One launch. MLX assembles the source of a kernel with so many inputs for longer than it launches it."""


def addresses_of(arrays: Sequence[mx.array]) -> mx.array:
    """Where arrays begin in the memory of the device. They stay there while they live, unless the host reads them: MLX
    then moves an array."""
    found = []
    for first in range(0, len(arrays), ADDRESSES):
        some = list(arrays[first : first + ADDRESSES])
        (out,) = _address_kernel()(
            inputs=some + [_nothing(arrays[0].dtype)] * (ADDRESSES - len(some)),
            output_shapes=[(ADDRESSES,)],
            output_dtypes=[mx.int64],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
        )
        found.append(out)
    joined = found[0] if len(found) == 1 else mx.concatenate(found)
    return joined[: len(arrays)]


@functools.cache
def _nothing(dtype: mx.Dtype) -> mx.array:
    """Fills the inputs of a launch. Not a slab once more: MLX ends a CUDA graph once its inputs have so many elements
    together, counted for each input."""
    array = mx.zeros((16,), dtype=dtype)
    mx.eval(array)
    return array
