"""Repacks GGUF's quantised blocks into MLX's quantised layout, losslessly.

Both store groups of 32 values as `scale * q + bias`; they differ in the bit order of `q` and in how the bias is stored.
Types with other groups (Q6_K, Q3_K, Q2_K, the IQ types) have no counterpart in MLX and are not repacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

GROUP = 32
_CHUNK = 1 << 24
"""Values to repack at once: otherwise the temporary arrays would take several times the size of a large embedding."""

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_FOUR = np.uint8(4)


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix in MLX's layout: `bits` per value, the first value in the lowest bits of its 32-bit word."""

    bits: int
    words: npt.NDArray[np.uint32]
    scales: _Floats
    biases: _Floats


def repack(kind: str, shape: tuple[int, ...], data: npt.NDArray[Any]) -> Packed:
    """Repack the raw blocks of a tensor whose type is one of `REPACKED`."""
    bits, block_bytes, block_values, unpack = _TYPES[kind]
    groups, lead = shape[-1] // GROUP, shape[:-1]
    blocks = data.reshape(-1, block_bytes)
    count, per_block = len(blocks), block_values // GROUP
    words = np.empty((count * per_block, bits), np.uint32)
    scales, biases = (np.empty(count * per_block, np.float32) for _ in range(2))
    step = _CHUNK // block_values
    for start in range(0, count, step):
        part = np.asarray(blocks[start : start + step])
        at = slice(start * per_block, (start + len(part)) * per_block)
        values, scale, bias = unpack(part)
        words[at] = _pack(values.reshape(-1, GROUP), bits)
        scales[at], biases[at] = scale.reshape(-1), bias.reshape(-1)
    return Packed(
        bits, words.reshape(*lead, groups * bits), scales.reshape(*lead, groups), biases.reshape(*lead, groups)
    )


def _pack(values: _Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Packs each group of 32 values into `bits` 32-bit words."""
    if bits == 8:
        packed = np.ascontiguousarray(values)
    elif bits == 4:
        packed = values[:, 0::2] | values[:, 1::2] << _FOUR
    else:
        eights = values.reshape(len(values), GROUP // 8, 8).astype(np.uint64)
        joined = np.bitwise_or.reduce(eights << np.arange(0, 8 * bits, bits, dtype=np.uint64), axis=-1)
        octets = joined.astype("<u8").view(np.uint8).reshape(len(values), GROUP // 8, 8)
        packed = np.ascontiguousarray(octets[..., :bits]).reshape(len(values), -1)
    return packed.view("<u4").astype(np.uint32, copy=False)


def _half(blocks: _Bytes, at: int) -> _Floats:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(octets: _Bytes) -> _Bytes:
    """The low nibbles of the bytes, then the high ones."""
    return np.concatenate([octets & np.uint8(15), octets >> _FOUR], axis=-1)


def _fifth_bits(octets: _Bytes) -> _Bytes:
    """One bit for each of 32 values, shifted to bit 4."""
    return np.unpackbits(octets, axis=-1, bitorder="little") << _FOUR


def _q4_0(blocks: _Bytes) -> tuple[_Bytes, _Floats, _Floats]:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, -8 * scale


def _q4_1(blocks: _Bytes) -> tuple[_Bytes, _Floats, _Floats]:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: _Bytes) -> tuple[_Bytes, _Floats, _Floats]:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale


def _q5_1(blocks: _Bytes) -> tuple[_Bytes, _Floats, _Floats]:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: _Bytes) -> tuple[_Bytes, _Floats, _Floats]:
    """Signed bytes: flipping the highest bit adds 128, which the bias subtracts again."""
    scale = _half(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(0x80), scale, -128 * scale


def _k_scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """Scale and bias of the 8 groups of a K block: 6 bits each, spread over 12 bytes, times two float16 factors."""
    low, mid, high = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scale = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minimum = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=-1)
    return _half(blocks, 0) * scale, -_half(blocks, 2) * minimum


def _q4_k(blocks: _Bytes) -> tuple[_Bytes, _Floats, _Floats]:
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, GROUP))
    return values, *_k_scales(blocks)


def _q5_k(blocks: _Bytes) -> tuple[_Bytes, _Floats, _Floats]:
    high = blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & np.uint8(1)
    values = _nibbles(blocks[:, 48:].reshape(-1, 4, GROUP)).reshape(-1, 8, GROUP)
    return values | high.swapaxes(1, 2) << _FOUR, *_k_scales(blocks)


_TYPES: dict[str, tuple[int, int, int, Callable[[_Bytes], tuple[_Bytes, _Floats, _Floats]]]] = {
    "Q4_0": (4, 18, 32, _q4_0),
    "Q4_1": (4, 20, 32, _q4_1),
    "Q5_0": (5, 22, 32, _q5_0),
    "Q5_1": (5, 24, 32, _q5_1),
    "Q8_0": (8, 34, 32, _q8_0),
    "Q4_K": (4, 144, 256, _q4_k),
    "Q5_K": (5, 176, 256, _q5_k),
}
"""Bits per value, bytes and values per block, and the function that unpacks a block."""

REPACKED = frozenset(_TYPES)
BITS = {kind: layout[0] for kind, layout in _TYPES.items()}
"""Bits per repacked value."""
