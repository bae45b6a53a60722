"""Serialises blocks and checkpoints: the names and the order of their arrays in an export, and in a file on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from millstream.backend.generation.prefix_store.cache_state import SavedState
from millstream.backend.generation.prefix_store.tensors import to_array
from millstream.types import Tensor

Parts = tuple[mx.array, ...]
"""The keys and values of one layer for some tokens of a row, plain or quantised: each (1, heads, tokens, any)."""

Layers = list[Parts]

NamedArrays = list[tuple[str, mx.array]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A point from which prefill can continue: the states of caches that cannot be sliced, and of the others the tokens
    after the last full block."""

    states: list[SavedState]
    tail: Layers

    @property
    def arrays(self) -> list[mx.array]:
        states = [array for state in self.states for array in state.arrays if array is not None]
        return states + [array for parts in self.tail for array in parts]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def name_layers(layers: Layers, prefix: str = "layer") -> NamedArrays:
    return [
        (f"{prefix}.{layer}.{number}", part) for layer, parts in enumerate(layers) for number, part in enumerate(parts)
    ]


def unpack_layers(tensors: Sequence[tuple[str, Tensor]], prefix: str = "layer") -> Layers:
    """Rebuild layers from `name_layers` output: the order of the tensors is the order of the layers and parts."""
    layers: dict[str, list[mx.array]] = {}
    for name, tensor in tensors:
        kind, layer, _ = name.split(".")
        if kind == prefix:
            layers.setdefault(layer, []).append(to_array(tensor))
    return [tuple(parts) for parts in layers.values()]


def pack_checkpoint(checkpoint: Checkpoint) -> tuple[NamedArrays, str]:
    """Returns the named arrays, and the integers of the states as JSON."""
    states = [
        (f"state.{leaf}.{number}", array)
        for leaf, state in enumerate(checkpoint.states)
        for number, array in enumerate(state.arrays)
        if array is not None
    ]
    described = [[len(state.arrays), *state.numbers] for state in checkpoint.states]
    return states + name_layers(checkpoint.tail, "tail"), json.dumps(described)


def unpack_checkpoint(tensors: Sequence[tuple[str, Tensor]], extra: str) -> Checkpoint:
    """Rebuild a checkpoint from `pack_checkpoint` output."""
    arrays = {name: to_array(tensor) for name, tensor in tensors if name.startswith("state.")}
    states = [
        SavedState(tuple(arrays.get(f"state.{leaf}.{number}") for number in range(count)), tuple(numbers))
        for leaf, (count, *numbers) in enumerate(json.loads(extra))
    ]
    return Checkpoint(states, unpack_layers(tensors, "tail"))
