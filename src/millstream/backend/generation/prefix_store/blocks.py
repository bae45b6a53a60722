"""KV blocks and checkpoints that the prefix cache saves, and their way back into a row's caches. Owner only.

Blocks that are saved together share one array per layer and part, a run: saving a prompt is one copy per layer, however
many blocks it has. The index evicts a run from its end, because a block is evicted only after those that extend it; the
rest of the run is then compacted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.slabs import SharedTokens
from millstream.backend.generation.prefix_store.cache_state import (
    fill_cache,
    is_sliceable,
    kv_parts,
    leaf_caches,
    restore_state,
    save_state,
)
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

TokensOf = Callable[[int, int], Layers]
"""Returns the keys and values of a row's tokens from one number to another, per layer."""


@dataclass(slots=True, eq=False)
class BlockRun:
    """Consecutive KV blocks in shared arrays. `blocks` counts those that are not evicted."""

    layers: Layers
    block: int
    """Tokens per block."""
    blocks: int
    readers: int = 0
    """Rows that read it instead of holding a copy."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for parts in self.layers for array in parts)


class PrefixStore:
    """Saved blocks and checkpoints by handle. The prefix cache of the engine decides what is saved and evicted."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[BlockRun, int]] = {}
        self._checkpoints: dict[int, Checkpoint] = {}
        self._partly_evicted: dict[int, BlockRun] = {}
        self.exports = ExportQueue()
        self.nbytes = 0

    def save(self, handles: Sequence[int], layers: Layers, export_id: int | None = None) -> list[mx.array]:
        """Save the tokens of `layers`, split evenly among the handles, as copies that free the source buffers.

        Returns the copies. Evaluate them before the next step writes to the source buffers.
        """
        block = layers[0][0].shape[2] // len(handles) if layers else 0
        run = BlockRun([tuple(mx.contiguous(part) for part in parts) for parts in layers], block, len(handles))
        for number, handle in enumerate(handles):
            self._blocks[handle] = (run, number)
        self.nbytes += run.nbytes
        if export_id is not None:
            self.exports.add(export_id, name_layers(run.layers))
        return _arrays(run)

    def restore(self, order: RestorePrefix) -> list[mx.array]:
        """Save exported blocks or an exported checkpoint under new handles. Evaluate the arrays it returns."""
        if order.checkpoint is not None:
            return self._add_checkpoint(order.checkpoint, unpack_checkpoint(order.tensors, order.extra), None)
        start, stop = order.first * order.block, (order.first + len(order.handles)) * order.block
        return self.save(order.handles, [_slice_tokens(parts, start, stop) for parts in unpack_layers(order.tensors)])

    def save_row(self, order: SavePrefix, caches: Sequence[Any]) -> list[mx.array]:
        """Save blocks and a checkpoint from the caches of a row that holds exactly `order.tokens` tokens. Evaluate the
        arrays it returns."""
        leaves = leaf_caches(caches)
        sliceable = [kv_parts(leaf) for leaf in leaves if is_sliceable(leaf) and leaf.keys is not None]
        return self.save_tokens(
            order,
            lambda start, stop: [_slice_tokens(parts, start, stop) for parts in sliceable],
            [leaf for leaf in leaves if not is_sliceable(leaf)],
        )

    def save_tokens(self, order: SavePrefix, tokens: TokensOf, others: Sequence[Any]) -> list[mx.array]:
        """The same for a row whose KV caches are elsewhere. `others`: its leaf caches that cannot be sliced."""
        start = order.first * order.block
        stop = start + len(order.handles) * order.block
        arrays = []
        if order.handles:
            arrays += self.save(order.handles, tokens(start, stop), order.export_id)
        if order.checkpoint is not None:
            border = order.tokens // order.block * order.block
            tail = tokens(border, order.tokens) if border < order.tokens else []
            states = [save_state(leaf) for leaf in others]
            checkpoint = Checkpoint(states, [tuple(mx.contiguous(part) for part in parts) for parts in tail])
            arrays += self._add_checkpoint(order.checkpoint, checkpoint, order.checkpoint_export_id)
        return arrays

    def _add_checkpoint(self, handle: int, checkpoint: Checkpoint, export_id: int | None) -> list[mx.array]:
        self._checkpoints[handle] = checkpoint
        self.nbytes += checkpoint.nbytes
        if export_id is not None:
            self.exports.add(export_id, *pack_checkpoint(checkpoint))
        return checkpoint.arrays

    def evict(self, handles: Iterable[int]) -> None:
        """Evict blocks and checkpoints. A run without blocks is freed here; a shortened one is left to `compact`."""
        for handle in handles:
            if (checkpoint := self._checkpoints.pop(handle, None)) is not None:
                self.nbytes -= checkpoint.nbytes
                continue
            run, number = self._blocks.pop(handle)
            run.blocks = min(run.blocks, number)
            self._partly_evicted[id(run)] = run
            if not run.readers:
                self._free(run)

    def _free(self, run: BlockRun) -> None:
        """Free a run of which no block is left."""
        if not run.blocks and self._partly_evicted.pop(id(run), None) is not None:
            self.nbytes -= run.nbytes
            run.layers = []

    def share(self, handles: Sequence[int], most: int) -> tuple[SharedTokens, ...]:
        """The first of these blocks, in at most so many runs, for a row to read. They are not freed until the row
        releases them, even if they are evicted."""
        shared = []
        for run, start, stop in self._spans(handles)[:most]:
            run.readers += 1
            release = functools.partial(self._release, run)
            shared.append(SharedTokens(run.layers, start * run.block, (stop - start) * run.block, release))
        return tuple(shared)

    def _release(self, run: BlockRun) -> None:
        run.readers -= 1
        if not run.readers:
            self._free(run)

    @property
    def compactable(self) -> int:
        """How many runs still hold the memory of evicted blocks that nobody reads."""
        return sum(not run.readers for run in self._partly_evicted.values())

    def compact(self) -> list[mx.array]:
        """Compact the oldest partly evicted run. Evaluate the arrays it returns.

        This copies into memory of a new size, which costs a GPU's host milliseconds.
        """
        run = self._partly_evicted.pop(next(key for key, run in self._partly_evicted.items() if not run.readers))
        self.nbytes -= run.nbytes
        tokens = run.blocks * run.block
        run.layers = [tuple(mx.contiguous(part[:, :, :tokens]) for part in parts) for parts in run.layers]
        self.nbytes += run.nbytes
        return _arrays(run)

    def clear(self) -> None:
        self._blocks.clear()
        self._checkpoints.clear()
        self._partly_evicted.clear()
        self.exports.clear()
        self.nbytes = 0

    def fill_caches(self, handles: Sequence[int], checkpoint_handle: int | None, caches: Sequence[Any]) -> None:
        """Fill fresh caches with these blocks in order, then with the checkpoint, if any."""
        spans = self._spans(handles)
        checkpoint = None if checkpoint_handle is None else self._checkpoints[checkpoint_handle]
        states = iter(checkpoint.states if checkpoint else ())
        layer = 0
        for leaf in leaf_caches(caches):
            if not is_sliceable(leaf):
                restore_state(leaf, next(states))
                continue
            pieces = [
                _slice_tokens(run.layers[layer], start * run.block, stop * run.block) for run, start, stop in spans
            ]
            pieces += [checkpoint.tail[layer]] if checkpoint and checkpoint.tail else []
            if pieces:
                fill_cache(leaf, [mx.concatenate(list(parts), axis=2) for parts in zip(*pieces, strict=True)])
            layer += 1

    def _spans(self, handles: Sequence[int]) -> list[tuple[BlockRun, int, int]]:
        """Merge the blocks into spans: a run, its first block, and the block after the last."""
        spans: list[tuple[BlockRun, int, int]] = []
        for handle in handles:
            run, number = self._blocks[handle]
            if spans and spans[-1][0] is run and spans[-1][2] == number:
                spans[-1] = (run, spans[-1][1], number + 1)
            else:
                spans.append((run, number, number + 1))
        return spans


def _slice_tokens(parts: Sequence[mx.array], start: int, stop: int) -> Parts:
    return tuple(part[:, :, start:stop] for part in parts)


def _arrays(run: BlockRun) -> list[mx.array]:
    return [array for parts in run.layers for array in parts]
