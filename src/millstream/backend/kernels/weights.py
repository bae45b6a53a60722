"""The weights that fused matmuls take: dense or packed, as arrays and a static form.

A compiled function takes arrays as its arguments, so that layers share it: `weight.arrays` go in, and inside
`weight.form.of(arrays)` is the weight again. A form can be hashed; it may be the key of a cache of such functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx


class Norm(NamedTuple):
    """An RMS norm: `weight` is what the normed numbers are multiplied by (Gemma: one more than its parameter)."""

    weight: mx.array
    eps: float


@dataclass(frozen=True, slots=True)
class Dense:
    """A weight of (outputs, inputs) in a floating-point type."""

    weight: mx.array
    tickets: mx.array | None = None
    """Counters for blocks that share a sum, from `FusedMatmuls.prepare`. Launches that may overlap share none."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.weight,) if self.tickets is None else (self.weight, self.tickets)

    @property
    def form(self) -> DenseForm:
        return DenseForm(len(self.arrays))

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class DenseForm:
    count: int

    def of(self, arrays: Sequence[mx.array]) -> Dense:
        return Dense(*arrays)


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight as `mx.quantize` gives it."""

    packed: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    group_size: int
    mode: str = "affine"
    tickets: mx.array | None = None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        more = (self.biases, self.tickets)
        return (self.packed, self.scales, *(array for array in more if array is not None))

    @property
    def form(self) -> PackedForm:
        biased, counted = self.biases is not None, self.tickets is not None
        return PackedForm(self.bits, self.group_size, self.mode, biased, counted)

    @property
    def outputs(self) -> int:
        return self.packed.shape[0]

    @property
    def inputs(self) -> int:
        return self.packed.shape[1] * 32 // self.bits


@dataclass(frozen=True, slots=True)
class PackedForm:
    bits: int
    group_size: int
    mode: str
    biased: bool
    counted: bool = False

    @property
    def count(self) -> int:
        return 2 + self.biased + self.counted

    def of(self, arrays: Sequence[mx.array]) -> Packed:
        biases = arrays[2] if self.biased else None
        tickets = arrays[-1] if self.counted else None
        return Packed(arrays[0], arrays[1], biases, self.bits, self.group_size, self.mode, tickets)


Weight = Dense | Packed
Form = DenseForm | PackedForm


def as_weight(weight: Weight | mx.array) -> Weight:
    """A plain array is a dense weight."""
    return Dense(weight) if isinstance(weight, mx.array) else weight
