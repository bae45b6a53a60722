"""The KV caches of a batch with full attention, by length class: rows join, grow and leave without copying others.

A row has a number in the batch, which is where a forward pass computes it, and a slot in a slab, which is where its
tokens are. The two are independent: rows are renumbered without touching memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from millstream.backend.generation.caches.due import Due
from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.caches.kernel_slabs import KernelStep, KernelWriter
from millstream.backend.generation.caches.pass_shape import PassShape
from millstream.backend.generation.caches.row_numbers import RowNumbers
from millstream.backend.generation.caches.slab_reads import SlabStep
from millstream.backend.generation.caches.slab_writers import MlxWriter
from millstream.backend.generation.caches.slabs import Move, Parts, RowCache, Slab, SlabPool
from millstream.backend.generation.caches.traced_step import Ref, TracedStep
from millstream.backend.generation.caches.widths import SlotPolicy
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.kernels.decode_attention import Packing
from millstream.engine.generation.kv_capacity import RING_SLACK, slot_capacity
from millstream.engine.prefix_cache.orders import SavePrefix


class SlabWriter(Protocol):
    """Writes to slabs between two steps: with MLX's own operations, or with kernels in place."""

    in_place: bool
    """True if MLX does not know of the writes: what is saved of a row must be copied for certain."""

    def join(self, rows: Sequence[RowCache], joining: JoiningRows) -> None:
        """Write the tokens of rows that join, without those that they share."""
        ...

    def move(self, moves: Sequence[Move]) -> None: ...

    def finish(self) -> None:
        """Before slots change hands."""
        ...

    def free(self, slab: Slab) -> None:
        """A slab is gone."""
        ...


class SlabLayer:
    """One layer's view of the slabs, with the interface that mlx-lm's attention layers expect of a cache. The layers
    must call our attention: see `layers/slab_attention.py`."""

    packing: Packing | None = None
    """How the slabs of a quantised KV cache are packed."""

    def __init__(self, caches: ClassCaches, index: int) -> None:
        self.caches = caches
        self.index = index
        self._new: tuple[mx.array, mx.array] | None = None
        self._written: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token."""
        return self.caches.step.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: attention knows what each row sees. Raises `ValueError` if a layer wants another window."""
        if N != 1 or (window_size or self.caches.window) != self.caches.window:
            raise ValueError("its layers do not attend to all tokens of their cache")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Attention writes the tokens of a step: until then they wait here."""
        self._new = (keys, values)
        return keys, values

    def take_new(self, keys: mx.array, values: mx.array, mask: Any) -> tuple[mx.array, mx.array]:
        """The keys and values of this step, again for every layer that shares them: writing them twice is harmless.
        Raises `ValueError` if a layer passes others on, or a mask of its own, as layers with latent vectors do:
        attention reads what the slabs hold."""
        new, self._new = self._new or self._written, None
        self._written = new
        if new is None or keys is not new[0] or values is not new[1] or mask is not None:
            raise ValueError("its layers do not pass the keys and values of the cache on to attention")
        return new

    def forget(self) -> None:
        """Drop the keys and values of a step: they may be tracers."""
        self._new = self._written = None

    @property
    def state(self) -> tuple[mx.array, mx.array] | None:
        """What layers that share these keys and values take from here: those of this step."""
        return self._written

    def keys_and_values(self) -> tuple[mx.array, mx.array] | None:
        return self._written

    def parts_of(self, new: tuple[mx.array, mx.array]) -> Parts:
        """New keys and values in the form in which slabs hold them."""
        return new

    def split(self, parts: Parts) -> tuple[Any, Any]:
        """Keys and values, as attention takes them."""
        return parts[0], parts[1]


class ClassCaches(TracedStep):
    """Owner only. The caches of a batch: see `BatchCaches`.

    `templates`: per layer, arrays whose heads, size and type slabs get. `policy`, `width`: see `RowNumbers`.
    `kernels`: our CUDA kernels read and write the slabs. `window`: rows attend to so many of their last tokens; 0: to
    all. `due`: of a batch with several kinds of layers, whose changes are sent together.
    """

    def __init__(
        self,
        templates: Sequence[Parts],
        policy: SlotPolicy,
        *,
        width: SlotPolicy | None = None,
        kernels: bool = False,
        window: int = 0,
        layer: Callable[[ClassCaches, int], SlabLayer] = SlabLayer,
        due: Due | None = None,
    ) -> None:
        self.window = window
        self.due = due or Due()
        self.layers = [layer(self, index) for index in range(len(templates))]
        self.rows: list[RowCache | None] = []
        self.step: SlabStep
        self._writer: SlabWriter
        if kernels:
            step = self.step = KernelStep(templates, window, self.due)
            self._writer = KernelWriter(templates, step.addresses, self.due)
        else:
            self.step, self._writer = SlabStep(window), MlxWriter()
        self._numbers = RowNumbers(policy, width)
        self.slabs = SlabPool(templates, self._writer.move, self._writer.free, merge=not kernels)

    @property
    def size(self) -> int:
        """How many rows a forward pass has."""
        return self._numbers.size

    @property
    def nbytes(self) -> int:
        return self.slabs.nbytes

    def keep_vacant(self, allowed: bool) -> None:
        """Whether slots that rows leave may stay vacant: see `SlabPool`."""
        if self.slabs.keep_vacant(allowed):
            self.step.changed()

    def join(self, joining: Sequence[JoiningRows]) -> list[int]:
        """Add rows. Returns their numbers, in order."""
        numbers = self._numbers.take(sum(each.count for each in joining))
        self.place(joining, numbers, self._numbers)
        return numbers

    def place(self, joining: Sequence[JoiningRows], numbers: list[int], every: RowNumbers) -> None:
        """Add rows under numbers that the caller has taken."""
        new = [
            (each, [RowCache(at, shared=each.shared, window=self.window, skipped=each.skipped) for at in each.lengths])
            for each in joining
        ]
        by_class: dict[int, list[RowCache]] = {}
        for _, rows in new:
            for row in rows:
                by_class.setdefault(slot_capacity(row.own + 1, self.window), []).append(row)
        for capacity, rows in by_class.items():
            self.slabs.place(rows, capacity)
        for each, rows in new:
            self._writer.join(rows, each)
            self.step.prepare(rows)
        self.step.changed()
        self.rows += [None] * (every.count - len(self.rows))
        for number, row in zip(numbers, (row for _, rows in new for row in rows), strict=True):
            self.rows[number] = row

    def filter(self, indices: list[int]) -> list[int]:
        """Drop all other rows. Returns the new order: the previous number of each, -1 for a fresh one."""
        order = self._numbers.keep(indices)
        self.rearrange(indices, order, self._numbers)
        return order

    def rearrange(self, kept: list[int], order: list[int], every: RowNumbers) -> None:
        """Drop the rows that are not kept, and number the others by `order`."""
        wanted = set(kept)
        ended = [row for number, row in enumerate(self.rows) if row is not None and number not in wanted]
        self._writer.finish()
        self.slabs.vacate(ended)
        for row in ended:
            for piece in row.shared:
                piece.release()
        self.step.changed()
        self.rows = [self.rows[number] if number in wanted else None for number in order[: every.count]]

    def save(self, index: int, order: SavePrefix, store: PrefixStore) -> list[mx.array]:
        """Save KV blocks of a row. Evaluate the arrays it returns at once: a copy that is still lazy would make the
        next step copy the slab."""
        self.due.send()
        start = order.first * order.block
        layers = self.tokens(index, start, start + len(order.handles) * order.block)
        return store.save(order.handles, layers, order.export_id)

    supports_length = True

    def begin_step(self, length: int = 1, shape: PassShape | None = None) -> None:
        """Ensure that every row has its next columns, prepare what all layers share in this step, and send what is due.
        `shape`: of the pass, if another decides that, who sends it too."""
        assert not self.window or length <= RING_SLACK + 1, "a ring would lose tokens that are still read"
        outgrown: dict[int, list[RowCache]] = {}
        for row in self.rows:
            if row is not None and row.outgrown(length):
                outgrown.setdefault(slot_capacity(row.own + length, self.window), []).append(row)
        for capacity, rows in outgrown.items():
            self.slabs.move(rows, capacity)
            self.step.changed()
        self.shape = self._numbers.shape(length) if shape is None else shape
        self.step.begin(self.rows, self.shape)
        if shape is None:
            self.due.send()

    def end_step(self, counts: Sequence[int] | None = None) -> None:
        """A row that does not keep all of its new tokens ends before them: nothing reads the columns behind its end,
        where its next tokens are written."""
        for number, row in enumerate(self.rows):
            if row is not None:
                row.length += self.shape.length if counts is None else counts[number]

    def step_key(self) -> Hashable | None:
        key = self.step.key()
        return None if key is None else (self.size, self.shape, key)

    def step_refs(self) -> list[Ref]:
        return self.step.refs()

    def result_refs(self) -> list[Ref]:
        return self.step.result_refs()

    def forget_step(self) -> None:
        for layer in self.layers:
            layer.forget()

    def lost_writes(self) -> bool:
        """True if a token that a row has written is still zero in all buffers: a kernel wrote it to a copy. The last
        token is not checked, since its step may be under way."""
        for row in self.rows:
            if row is None or row.kept < 2:
                continue
            # Parts may be of several sizes, so each tells which columns it fills.
            filled = [mx.any(self._in_order(row, part) != 0, axis=(0, 1, 3))[:-1] for part in row.place.arrays]
            if not mx.all(mx.any(mx.stack(filled), axis=0)).item():
                return True
        return False

    def tokens(self, index: int, start: int, stop: int) -> list[Parts]:
        """Some tokens of a row, per layer. If kernels write to the slabs, copies."""
        row = self.rows[index]
        assert row is not None, "no row has this number"
        sources = [(piece.layers, 0, piece.start, piece.tokens) for piece in row.shared]
        sources.append(([tuple(parts) for parts in row.place.layers], row.slot, 0, row.own))
        found: list[list[Parts]] = []
        at = 0
        for layers, slot, first, tokens in sources:
            low, high = max(start, at), min(stop, at + tokens)
            if low < high:
                columns = slice(first + low - at, first + high - at)
                found.append([tuple(part[slot : slot + 1, :, columns] for part in parts) for parts in layers])
            at += tokens
        joined = found[0] if len(found) == 1 else [_concatenate(pieces) for pieces in zip(*found, strict=True)]
        # `contiguous` shares a buffer that is nearly all needed: not if kernels go on writing to it.
        return [tuple(part * 1 for part in parts) for parts in joined] if self._writer.in_place else joined

    def window_row(self, index: int) -> list[RotatingKVCache]:
        """What a row of a sliding window holds, as mlx-lm's caches of one row. If kernels write to slabs, copies."""
        row = self.rows[index]
        assert row is not None and self.window, "no row of a window has this number"
        found = []
        for parts in row.place.layers:
            cache = RotatingKVCache(self.window)
            cache.offset, cache._idx = row.length, row.kept
            if row.kept:
                cache.keys, cache.values = (self._in_order(row, part) for part in parts)
            found.append(cache)
        return found

    def _in_order(self, row: RowCache, part: mx.array) -> mx.array:
        runs = [part[row.slot : row.slot + 1, :, first:end] for first, end in row.runs()]
        if len(runs) > 1:
            return mx.concatenate(runs, axis=2)
        return runs[0] * 1 if self._writer.in_place else runs[0]


def _concatenate(pieces: Sequence[Parts]) -> Parts:
    return tuple(mx.concatenate(list(parts), axis=2) for parts in zip(*pieces, strict=True))
