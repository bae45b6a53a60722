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
from millstream.backend.generation.caches.pass_shape import PassShape
from millstream.backend.generation.layers import attention, block_search
from millstream.backend.generation.layout_choice import plain_cache, quantised_cache
from millstream.backend.generation.layout_choice.fast_paths import FastPaths
from millstream.backend.kernels.decode_attention import ITEM, DecodeWork, Packing


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

    def join_rows(
        self, sources: Sequence[mx.array], places: Sequence[Sequence[int]], addresses: mx.array
    ) -> list[mx.array]:
        self.count("join_rows")
        table = np.array(addresses).reshape(addresses.shape[0], -1)
        found = [np.array(source) for source in sources]
        mx.synchronize()
        for number, source in enumerate(found):
            heads, size = source.shape[1], source.shape[3]
            for slab, slot, capacity, row, first, tokens, column, _ in places:
                target = at(int(table[slab, number]), (slot + 1, heads, capacity, size), source.dtype)
                for token in range(tokens):
                    target[slot, :, (column + token) % capacity] = source[row, :, first + token]
        return [mx.array([1])]

    def move_rows(self, moves: Sequence[Sequence[int]], addresses: mx.array, parts: Sequence[mx.array]) -> mx.array:
        self.count("move_rows")
        table = np.array(addresses).reshape(addresses.shape[0], -1)
        mx.synchronize()
        heads = parts[0].shape[1]
        widths = [part.shape[3] * part.dtype.size for part in parts]
        for source, source_slot, source_capacity, target, target_slot, target_capacity, tokens, _ in moves:
            for old, new, width in zip(table[source], table[target], widths, strict=True):
                begin = at(int(old), (source_slot + 1, heads, source_capacity, width), np.uint8)
                end = at(int(new), (target_slot + 1, heads, target_capacity, width), np.uint8)
                end[target_slot, :, :tokens] = begin[source_slot, :, :tokens]
        return mx.array([1])

    def decode(
        self,
        queries: mx.array,
        new: Sequence[mx.array],
        work: DecodeWork,
        layer: mx.array,
        scale: float,
        *,
        sinks: mx.array | None = None,
        softcap: float | None = None,
        packing: Packing | None = None,
    ) -> mx.array:
        self.count("parted decode" if work.parted else "decode")
        shape = PassShape(work.lengths.shape[0], queries.shape[0], work.count)
        queries, *new = (shape.grouped(each) for each in (queries, *new))
        q = np.array(queries).astype(np.float32)
        fresh = [_parts(each, packing) for each in new]
        table, lengths = np.array(work.addresses), np.array(work.lengths)
        count, groups, size = q.shape[2], new[0].shape[1], q.shape[3]
        mx.synchronize()
        items = np.array(work.items).reshape(-1, ITEM)
        check_items(items, q.shape[0], parted=work.parted)
        found: dict[int, list[tuple[Any, Any, Any]]] = {}
        for row, slab, slot, capacity, first, beyond, origin, live, window, *_ in items.tolist():
            if row < 0 or slab < 0:
                continue
            bases = table[slab, int(layer[0].item())].tolist()
            views = []
            for parts in fresh:
                shapes = [(slot + 1, groups, capacity, part.shape[-1]) for part in parts]
                views.append(
                    [at(bases.pop(0), shape, part.dtype)[slot] for shape, part in zip(shapes, parts, strict=True)]
                )
            end = int(lengths[row]) - origin
            for index in range(count) if live else ():
                column = (end + index) % capacity if window else end + index
                if first <= column < beyond:
                    for view, parts in zip(views, fresh, strict=True):
                        for target, source in zip(view, parts, strict=True):
                            target[:, column] = source[row, :, index]
            columns = np.arange(first, beyond)
            seen = np.ones((count, len(columns)), dtype=bool)
            if live:
                last = end + count - 1
                numbers = last - (last - columns) % capacity if window else columns
                own = end + np.arange(count)[:, None]
                seen = (numbers >= 0) & (numbers <= own) & (numbers > own - (window or 2**30))
            keys, values = (_unpacked([part[:, first:beyond] for part in view], packing) for view in views)
            found.setdefault(row, []).append((keys, values, seen))
        out = np.zeros(q.shape, dtype=np.float32)
        for row, pieces in found.items():
            keys, values = (np.concatenate([piece[index] for piece in pieces], axis=1) for index in (0, 1))
            seen = np.concatenate([piece[2] for piece in pieces], axis=1)
            grouped = q[row].reshape(groups, -1, count, size)
            scores = np.einsum("hgqd,hkd->hgqk", grouped, keys) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            scores = np.where(seen, scores, -np.inf)
            sink = np.full((groups, grouped.shape[1], 1, 1), -np.inf)
            if sinks is not None:
                sink = np.array(sinks.astype(mx.float32)).reshape(sink.shape)
            top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
            weights = np.exp(scores - top)
            total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)
            # Columns that nobody sees may hold anything, also what is no number.
            values = np.where(seen.any(axis=0)[None, :, None], values, 0)
            out[row] = np.einsum("hgqk,hkd->hgqd", weights / total, values).reshape(q.shape[1:])
        return shape.flattened(mx.array(out).astype(queries.dtype))


def _parts(new: mx.array, packing: Packing | None) -> list[Any]:
    """New keys or values as slabs hold them."""
    if packing is None:
        return [np.array(new)]
    return [np.array(each) for each in mx.quantize(new, group_size=packing.group_size, bits=packing.bits)]


def _unpacked(parts: Sequence[Any], packing: Packing | None) -> Any:
    if packing is None:
        return parts[0].astype(np.float32)
    words, scales, biases = (mx.array(np.ascontiguousarray(part)) for part in parts)
    plain = mx.dequantize(words, scales, biases, group_size=packing.group_size, bits=packing.bits)
    return np.array(plain.astype(mx.float32))


def check_items(items: Any, rows: int, *, parted: bool) -> None:
    """Every row has items that follow each other, and knows them."""
    expected = 0
    for number, item in enumerate(items.tolist()):
        if item[0] < 0:
            assert parted, "padding where item n must be row n"
            continue
        assert item[9] <= number < item[9] + item[10], item
        assert parted or (item[10] == 1 and item[0] == number), item
        if item[9] == number:
            assert item[0] == expected, f"row {expected} has no items"
            assert item[11] in (0, item[5]), item
            expected += 1
        assert item[0] == expected - 1, item
    assert expected == rows, "rows without items"


def play_pointer_kernels(monkeypatch: pytest.MonkeyPatch, kernels: PointerKernels) -> None:
    monkeypatch.setattr(kernel_slabs, "addresses_of", kernels.addresses_of)
    monkeypatch.setattr(kernel_slabs, "write_rows", kernels.write_rows)
    monkeypatch.setattr(kernel_slabs, "join_rows", kernels.join_rows)
    monkeypatch.setattr(kernel_slabs, "move_rows", kernels.move_rows)
    monkeypatch.setattr(attention, "slab_decode", kernels.decode)
    monkeypatch.setattr(attention, "decode_fits", lambda *_: True)


def backend_with_kernels(monkeypatch: pytest.MonkeyPatch, *, blocks: bool = True) -> PointerKernels:
    """Have a backend that else runs as on the CPU read and write slabs by these kernels. `blocks`: in fused blocks
    too."""
    played = PointerKernels()
    play_pointer_kernels(monkeypatch, played)
    monkeypatch.setattr(FastPaths, "kernels_write", True)
    for module in (plain_cache, quantised_cache):
        monkeypatch.setattr(module, "slab_attention", lambda plain: attention.kernel_attention)
    monkeypatch.setattr(attention, "prefill_fits", lambda *_: False)
    if blocks:
        check = block_search.check_attention
        monkeypatch.setattr(block_search, "check_attention", lambda *given, kernels: check(*given, kernels=True))
    return played
