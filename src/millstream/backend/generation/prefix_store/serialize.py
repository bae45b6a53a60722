"""What is kept of a row, and the names that its arrays have outside: in a file of blocks or of a state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from millstream.backend.generation.prefix_store.cache_state import SavedState
from millstream.backend.generation.prefix_store.tensors import to_array
from millstream.types import Tensor

Parts = tuple[mx.array, ...]
"""What one layer holds of some tokens of a row, keys and values in some form: each (1, heads, tokens, any)."""

Layers = list[Parts]

Named = list[tuple[str, mx.array]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where one can go on: the states of some layers, and what follows the last whole block in the others."""

    states: list[SavedState]
    tail: Layers

    @property
    def arrays(self) -> list[mx.array]:
        saved = [array for state in self.states for array in state.arrays if array is not None]
        return saved + [array for parts in self.tail for array in parts]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def name_layers(layers: Layers, prefix: str = "layer") -> Named:
    return [
        (f"{prefix}.{layer}.{number}", part) for layer, parts in enumerate(layers) for number, part in enumerate(parts)
    ]


def unpack_layers(tensors: Sequence[tuple[str, Tensor]], prefix: str = "layer") -> Layers:
    """In the order in which they were named."""
    layers: dict[str, list[mx.array]] = {}
    for name, tensor in tensors:
        kind, layer, _ = name.split(".")
        if kind == prefix:
            layers.setdefault(layer, []).append(to_array(tensor))
    return [tuple(parts) for parts in layers.values()]


def pack_checkpoint(checkpoint: Checkpoint) -> tuple[Named, str]:
    """Its arrays, and as text what is no array."""
    named = [
        (f"state.{leaf}.{number}", array)
        for leaf, state in enumerate(checkpoint.states)
        for number, array in enumerate(state.arrays)
        if array is not None
    ]
    described = [[len(state.arrays), *state.numbers] for state in checkpoint.states]
    return named + name_layers(checkpoint.tail, "tail"), json.dumps(described)


def unpack_checkpoint(tensors: Sequence[tuple[str, Tensor]], extra: str) -> Checkpoint:
    arrays = {name: to_array(tensor) for name, tensor in tensors if name.startswith("state.")}
    states = [
        SavedState(tuple(arrays.get(f"state.{leaf}.{number}") for number in range(count)), tuple(numbers))
        for leaf, (count, *numbers) in enumerate(json.loads(extra))
    ]
    return Checkpoint(states, unpack_layers(tensors, "tail"))
