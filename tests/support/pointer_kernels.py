"""Our CUDA kernels that read and write slabs by address, played by NumPy on the CPU.

They read and write the very memory of the arrays, behind MLX's back, as the kernels do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from millstream.backend.generation.caches import kernel_slabs
from millstream.backend.generation.layers import attention
from millstream.backend.kernels.decode_attention import ITEM, DecodeWork


def memory(array: mx.array) -> Any:
    """The memory of an array itself, once all that reads it is done."""
    mx.eval(array)
    mx.synchronize()
    return np.array(array, copy=False)


def at(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array over memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).reshape(shape)


class PointerKernels:
    """The kernels, and how often each was called."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def addresses_of(self, arrays: Sequence[mx.array]) -> mx.array:
        self.count("addresses")
        return mx.array(np.array([memory(array).ctypes.data for array in arrays], dtype=np.int64))

    def write_rows(self, part: mx.array, rows: mx.array, places: mx.array) -> mx.array:
        self.count("write_rows")
        source, target = np.array(rows), memory(part)
        for index, (slot, skip, tokens, column) in enumerate(np.array(places).tolist()):
            for token in range(tokens):
                target[slot, :, (column + token) % target.shape[2]] = source[index, :, skip + token]
        return mx.array([1])

    def move_rows(self, moves: Sequence[Sequence[int]], addresses: mx.array, like: mx.array) -> mx.array:
        self.count("move_rows")
        table = np.array(addresses).reshape(addresses.shape[0], -1)
        mx.synchronize()
        heads, size, dtype = like.shape[1], like.shape[3], np.array(like).dtype
        for source, source_slot, source_capacity, target, target_slot, target_capacity, tokens, _ in moves:
            for old, new in zip(table[source], table[target], strict=True):
                begin = at(int(old), (source_slot + 1, heads, source_capacity, size), dtype)
                end = at(int(new), (target_slot + 1, heads, target_capacity, size), dtype)
                end[target_slot, :, :tokens] = begin[source_slot, :, :tokens]
        return mx.array([1])

    def decode(
        self, queries: mx.array, new: tuple[mx.array, mx.array], work: DecodeWork, layer: mx.array, scale: float
    ) -> mx.array:
        self.count("parted decode" if work.parted else "decode")
        q, fresh = np.array(queries), [np.array(each)[:, :, 0] for each in new]
        table, lengths = np.array(work.addresses), np.array(work.lengths)
        mx.synchronize()
        found: dict[int, list[tuple[Any, Any]]] = {}
        for item in np.array(work.items).reshape(-1, ITEM).tolist():
            row, slab, slot, capacity, first, beyond, origin, live = item
            if slab < 0:
                continue
            heads, size = fresh[0].shape[1:]
            bases = table[slab, int(layer.item())]
            views = [at(int(base), (slot + 1, heads, capacity, size), q.dtype)[slot] for base in bases]
            end = int(lengths[row]) - origin
            if live and first <= end < beyond:
                for view, column in zip(views, fresh, strict=True):
                    view[:, end] = column[row]
            last = min(beyond - 1, end) if live else beyond - 1
            if first <= last:
                keys, values = (view[:, first : last + 1].astype(np.float32) for view in views)
                found.setdefault(row, []).append((keys, values))
        out = np.zeros(q.shape, dtype=np.float32)
        for row, parts in found.items():
            keys, values = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
            grouped = q[row, :, 0].astype(np.float32).reshape(keys.shape[0], -1, q.shape[-1])
            scores = grouped @ keys.swapaxes(-1, -2) * scale
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[row, :, 0] = (weights @ values / weights.sum(axis=-1, keepdims=True)).reshape(-1, q.shape[-1])
        return mx.array(out).astype(queries.dtype)


def play_pointer_kernels(monkeypatch: pytest.MonkeyPatch, kernels: PointerKernels) -> None:
    monkeypatch.setattr(kernel_slabs, "addresses_of", kernels.addresses_of)
    monkeypatch.setattr(kernel_slabs, "write_rows", kernels.write_rows)
    monkeypatch.setattr(kernel_slabs, "move_rows", kernels.move_rows)
    monkeypatch.setattr(attention, "slab_decode", kernels.decode)
    monkeypatch.setattr(attention, "decode_fits", lambda *_: True)
