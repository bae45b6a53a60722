"""Keys, values and states that are kept for later prompts. Owner only.

Blocks that were kept together lie together, a run, so that keeping a prompt is one copy a layer however many blocks it
has. The index forgets a run from its end, because what stands on a block goes before it: then the run is cut shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.generation.prefix_store.cache_state import fill, is_plain, leaves, parts_of, restore, save
from millstream.backend.generation.prefix_store.export_queue import ExportQueue
from millstream.backend.generation.prefix_store.serialize import (
    Checkpoint,
    Layers,
    Parts,
    name_layers,
    pack_checkpoint,
    unpack_checkpoint,
    unpack_layers,
)
from millstream.engine.prefix_cache.orders import RestorePrefix, SavePrefix


@dataclass(slots=True, eq=False)
class BlockRun:
    layers: Layers
    block: int
    blocks: int

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for parts in self.layers for array in parts)


class PrefixStore:
    def __init__(self) -> None:
        self._places: dict[int, tuple[BlockRun, int]] = {}
        self._checkpoints: dict[int, Checkpoint] = {}
        self._loose: dict[int, BlockRun] = {}
        self.spool = ExportQueue()
        self.nbytes = 0

    def keep(self, handles: Sequence[int], layers: Layers, export_id: int | None = None) -> list[mx.array]:
        """The tokens of `layers`, cut evenly among the handles. Copied, so that the buffers they are cut from are free;
        what is returned must be evaluated before the next step writes to those."""
        block = layers[0][0].shape[2] // len(handles) if layers else 0
        run = BlockRun([tuple(mx.contiguous(part) for part in parts) for parts in layers], block, len(handles))
        for number, handle in enumerate(handles):
            self._places[handle] = (run, number)
        self.nbytes += run.nbytes
        if export_id is not None:
            self.spool.add(export_id, name_layers(run.layers))
        return _arrays(run)

    def load(self, order: RestorePrefix) -> list[mx.array]:
        """Keep again what was handed out before. Evaluate what is returned."""
        if order.checkpoint is not None:
            return self._hold(order.checkpoint, unpack_checkpoint(order.tensors, order.extra), None)
        start, stop = order.first * order.block, (order.first + len(order.handles)) * order.block
        return self.keep(order.handles, [_span(parts, start, stop) for parts in unpack_layers(order.tensors)])

    def keep_row(self, order: SavePrefix, caches: Sequence[Any]) -> list[mx.array]:
        """What `order` says, of a row that has read exactly so many tokens. Evaluate what is returned."""
        plain = [parts_of(leaf) for leaf in leaves(caches) if is_plain(leaf) and leaf.keys is not None]
        start = order.first * order.block
        stop = start + len(order.handles) * order.block
        arrays = []
        if order.handles:
            arrays += self.keep(order.handles, [_span(parts, start, stop) for parts in plain], order.export_id)
        if order.checkpoint is not None:
            border = order.tokens // order.block * order.block
            tail = [_span(parts, border, order.tokens) for parts in plain] if border < order.tokens else []
            states = [save(leaf) for leaf in leaves(caches) if not is_plain(leaf)]
            checkpoint = Checkpoint(states, [tuple(mx.contiguous(part) for part in parts) for parts in tail])
            arrays += self._hold(order.checkpoint, checkpoint, order.checkpoint_export_id)
        return arrays

    def _hold(self, handle: int, checkpoint: Checkpoint, export_id: int | None) -> list[mx.array]:
        self._checkpoints[handle] = checkpoint
        self.nbytes += checkpoint.nbytes
        if export_id is not None:
            self.spool.add(export_id, *pack_checkpoint(checkpoint))
        return checkpoint.arrays

    def forget(self, handles: Iterable[int]) -> None:
        """A run of which nothing is left is freed here, one of which something is left by `trim`."""
        for handle in handles:
            if (checkpoint := self._checkpoints.pop(handle, None)) is not None:
                self.nbytes -= checkpoint.nbytes
                continue
            run, number = self._places.pop(handle)
            run.blocks = min(run.blocks, number)
            if run.blocks:
                self._loose[id(run)] = run
            else:
                self._loose.pop(id(run), None)
                self.nbytes -= run.nbytes
                run.layers = []

    @property
    def loose(self) -> int:
        """How many runs hold more than is wanted of them."""
        return len(self._loose)

    def trim(self) -> list[mx.array]:
        """Cut the first of them: a copy into memory of a new size, which takes a GPU's host milliseconds. Evaluate what
        is returned."""
        run = self._loose.pop(next(iter(self._loose)))
        self.nbytes -= run.nbytes
        tokens = run.blocks * run.block
        run.layers = [tuple(mx.contiguous(part[:, :, :tokens]) for part in parts) for parts in run.layers]
        self.nbytes += run.nbytes
        return _arrays(run)

    def clear(self) -> None:
        self._places.clear()
        self._checkpoints.clear()
        self._loose.clear()
        self.spool.clear()
        self.nbytes = 0

    def restore(self, handles: Sequence[int], state: int | None, caches: Sequence[Any]) -> None:
        """Put blocks, one after the other, and then a state, into fresh caches."""
        pieces = self._pieces(handles)
        checkpoint = None if state is None else self._checkpoints[state]
        states = iter(checkpoint.states if checkpoint else ())
        number = 0
        for leaf in leaves(caches):
            if not is_plain(leaf):
                restore(leaf, next(states))
                continue
            spans = [_span(run.layers[number], start * run.block, stop * run.block) for run, start, stop in pieces]
            spans += [checkpoint.tail[number]] if checkpoint and checkpoint.tail else []
            if spans:
                fill(leaf, [mx.concatenate(list(parts), axis=2) for parts in zip(*spans, strict=True)])
            number += 1

    def _pieces(self, handles: Sequence[int]) -> list[tuple[BlockRun, int, int]]:
        """Runs, and from where to where they are wanted."""
        pieces: list[tuple[BlockRun, int, int]] = []
        for handle in handles:
            run, number = self._places[handle]
            if pieces and pieces[-1][0] is run and pieces[-1][2] == number:
                pieces[-1] = (run, pieces[-1][1], number + 1)
            else:
                pieces.append((run, number, number + 1))
        return pieces


def _span(parts: Sequence[mx.array], start: int, stop: int) -> Parts:
    return tuple(part[:, :, start:stop] for part in parts)


def _arrays(run: BlockRun) -> list[mx.array]:
    return [array for parts in run.layers for array in parts]
