"""Keys and values that are kept for later prompts. Owner only.

Blocks that were kept together lie together, a run, so that keeping a prompt is one copy a layer however many blocks it
has. The index forgets a run from its end, because what stands on a block goes before it: then the run is cut shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.quantized_kv import fill

Layers = list[tuple[mx.array, ...]]
"""What the layers keep of some tokens of a row, in parts: (1, heads, tokens, size)."""


@dataclass(slots=True, eq=False)
class _Run:
    layers: Layers
    block: int
    blocks: int

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.layers for part in parts)


class KeptBlocks:
    def __init__(self) -> None:
        self._places: dict[int, tuple[_Run, int]] = {}
        self.nbytes = 0

    def keep(self, handles: Sequence[int], layers: Layers) -> list[mx.array]:
        """The tokens of `layers`, cut evenly among the handles. Copied, so that the buffers they are cut from are free;
        what is returned must be evaluated before the next step writes to those."""
        block = layers[0][0].shape[2] // len(handles)
        run = _Run([tuple(map(mx.contiguous, parts)) for parts in layers], block, len(handles))
        for number, handle in enumerate(handles):
            self._places[handle] = (run, number)
        self.nbytes += run.nbytes
        return _arrays(run)

    def forget(self, handles: Iterable[int]) -> list[mx.array]:
        """What is returned must be evaluated, so that the memory is free."""
        cut: dict[int, _Run] = {}
        for handle in handles:
            run, number = self._places.pop(handle)
            self.nbytes -= 0 if id(run) in cut else run.nbytes
            cut[id(run)] = run
            run.blocks = min(run.blocks, number)
        left: list[mx.array] = []
        for run in cut.values():
            tokens = run.blocks * run.block
            run.layers = [tuple(mx.contiguous(part[:, :, :tokens]) for part in parts) for parts in run.layers]
            self.nbytes += run.nbytes
            left += _arrays(run) if tokens else []
        return left

    def clear(self) -> None:
        self._places.clear()
        self.nbytes = 0

    def restore(self, handles: Sequence[int], caches: Sequence[Any]) -> None:
        """Put blocks, one after the other, into fresh caches."""
        pieces = self._pieces(handles)
        for layer, cache in enumerate(caches):
            cuts = [
                [part[:, :, start * run.block : stop * run.block] for part in run.layers[layer]]
                for run, start, stop in pieces
            ]
            fill(cache, [mx.concatenate(list(parts), axis=2) for parts in zip(*cuts, strict=True)])

    def _pieces(self, handles: Sequence[int]) -> list[tuple[_Run, int, int]]:
        """Runs, and from where to where they are wanted."""
        pieces: list[tuple[_Run, int, int]] = []
        for handle in handles:
            run, number = self._places[handle]
            if pieces and pieces[-1][0] is run and pieces[-1][2] == number:
                pieces[-1] = (run, pieces[-1][1], number + 1)
            else:
                pieces.append((run, number, number + 1))
        return pieces


def _arrays(run: _Run) -> list[mx.array]:
    return [array for parts in run.layers for array in parts]
