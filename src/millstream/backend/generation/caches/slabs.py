"""Slabs: the memory of the KV cache, allocated by length class. Owner only.

A slab has some slots of one capacity (`kv_capacity`); a row's tokens stand in one slot, from column 0 on. A slab is
never copied to grow: rows that find no vacant slot get a new slab, and a row that outgrows its slot moves, alone, to
one of the next class. Slots that rows leave are filled first, and what is too sparse is emptied, so that the memory
follows the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from millstream.engine.generation.kv_capacity import SPARE_TOKENS, slot_capacity, spare_slots

Parts = tuple[mx.array, ...]
"""The KV cache of a layer, tokens on axis 2: keys and values, or the packed weights, scales and biases of each."""

SLAB_TOKENS = 16384
"""The most tokens of a slab with several slots. Longer rows have a slab of their own."""


MOST_ELEMENTS = 2**31 - 1
"""Of an array that many layers share: MLX counts larger ones in other kernels, which nobody has tried."""


class Slab:
    """Memory for some rows of one class: per layer and part, (slots, heads, capacity, size)."""

    __slots__ = ("buffers", "capacity", "layers", "most_heads", "nbytes", "rows", "where")

    def __init__(self, capacity: int, slots: int, templates: Sequence[Parts], *, together: bool = False) -> None:
        """`templates`: arrays whose heads, size and type the parts get. `together`: parts that are alike are views of
        one array, which a GPU allocates and clears at once; only if nothing but kernels writes to them."""
        self.capacity = capacity
        self.rows: list[RowCache | None] = [None] * slots
        self.most_heads = max((like.shape[1] for parts in templates for like in parts), default=0)
        self.buffers: list[mx.array] = []
        """What is allocated."""
        self.where: list[tuple[int, int]] = []
        """For each part of each layer: its buffer, and its place in it in bytes."""
        shapes = [
            ((slots, like.shape[1], capacity, like.shape[3]), like.dtype) for parts in templates for like in parts
        ]
        counts: dict[tuple[tuple[int, ...], mx.Dtype], int] = {}
        for kind in shapes:
            counts[kind] = counts.get(kind, 0) + 1
        numbers: dict[tuple[tuple[int, ...], mx.Dtype], int] = {}
        taken: dict[int, int] = {}
        views: list[mx.array] = []
        for kind in shapes:
            shape, dtype = kind
            if not together or counts[kind] * math.prod(shape) > MOST_ELEMENTS:
                self.buffers.append(mx.zeros(shape, dtype=dtype))
                self.where.append((len(self.buffers) - 1, 0))
                views.append(self.buffers[-1])
                continue
            if kind not in numbers:
                numbers[kind] = len(self.buffers)
                self.buffers.append(mx.zeros((counts[kind], *shape), dtype=dtype))
            buffer = numbers[kind]
            at = taken[buffer] = taken.get(buffer, -1) + 1
            self.where.append((buffer, at * math.prod(shape) * dtype.size))
            views.append(mx.squeeze(self.buffers[buffer][at : at + 1], axis=0))  # `[at]` would be a copy
        found = iter(views)
        self.layers = [[next(found) for _ in parts] for parts in templates]
        self.nbytes = sum(buffer.nbytes for buffer in self.buffers)

    @property
    def used(self) -> int:
        return sum(row is not None for row in self.rows)

    @property
    def vacant(self) -> int:
        return len(self.rows) - self.used

    @property
    def arrays(self) -> list[mx.array]:
        return [part for parts in self.layers for part in parts]


@dataclass(slots=True, eq=False)
class RowCache:
    """Where the tokens of a row are: `shared` holds its first ones, its slot the others."""

    length: int
    """Tokens in the cache, and those that were skipped: the position of the next one."""
    slab: Slab | None = None
    slot: int = -1
    shared: tuple[SharedTokens, ...] = ()
    window: int = 0
    """How many tokens it attends to, the new one included; 0: all. Its slot then becomes a ring."""
    skipped: int = 0
    """Tokens of its prompt that were never read (SpecPrefill). Those that were have their true positions in them."""
    origin: int = field(init=False)
    """How many tokens are not in its slot: its next token's position, less its column."""

    def __post_init__(self) -> None:
        self.origin = self.skipped + sum(piece.tokens for piece in self.shared)

    @property
    def own(self) -> int:
        """Tokens in its slot."""
        return self.length - self.origin

    @property
    def kept(self) -> int:
        """Tokens that are still read."""
        return min(self.own, self.window) if self.window else self.own

    @property
    def columns(self) -> int:
        """Columns of its slot that may hold tokens."""
        return min(self.own, self.place.capacity)

    def outgrown(self, length: int = 1) -> bool:
        """Whether its next tokens need a longer slot."""
        tokens, capacity = self.own + length, self.place.capacity
        return tokens > capacity and slot_capacity(tokens, self.window) != capacity

    def runs(self) -> list[tuple[int, int]]:
        """The tokens that are still read, oldest first: the first column of each run, and the one after the last."""
        if not self.kept:
            return []
        capacity = self.place.capacity
        first = (self.own - self.kept) % capacity
        end = first + self.kept
        return [(first, end)] if end <= capacity else [(first, capacity), (0, end - capacity)]

    @property
    def place(self) -> Slab:
        assert self.slab is not None, "the row has no slot"
        return self.slab


@dataclass(frozen=True, slots=True, eq=False)
class SharedTokens:
    """Tokens that the prefix cache holds and rows read there: columns `start` to `start + tokens` of `layers`."""

    layers: Sequence[Parts]
    start: int
    tokens: int
    release: Callable[[], None] = lambda: None
    """Called when the row no longer reads them."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first tokens of a slot to another slot."""

    source: Slab
    source_slot: int
    target: Slab
    target_slot: int
    tokens: int


class SlabPool:
    """All slabs of a batch. `copy` runs moves; `merge`: have few slabs per class, as full as can be, since each costs a
    call and vacant slots are computed. Otherwise slabs cost nothing, and moves are what is saved."""

    def __init__(self, templates: Sequence[Parts], copy: Callable[[Sequence[Move]], None], *, merge: bool) -> None:
        self._templates = templates
        self._copy = copy
        self._merge = merge
        self._classes: dict[int, list[Slab]] = {}

    def __iter__(self) -> Iterator[Slab]:
        for slabs in self._classes.values():
            yield from slabs

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self)

    def place(self, rows: Sequence[RowCache], capacity: int) -> None:
        """Give new rows slots of a class."""
        vacant = self._vacant(capacity)
        if len(rows) > len(vacant):
            self._add(capacity, len(rows))
            vacant = self._vacant(capacity)
        for row, (slab, slot) in zip(rows, vacant, strict=False):
            _occupy(row, slab, slot)

    def move(self, rows: Sequence[RowCache], capacity: int) -> None:
        """Move rows to slots of another class. Some at a time: until their old slabs are freed, they exist twice."""
        at_once = max(1, SLAB_TOKENS // capacity)
        for first in range(0, len(rows), at_once):
            self._move(rows[first : first + at_once], capacity)

    def _move(self, rows: Sequence[RowCache], capacity: int) -> None:
        sources = [(row.place, row.slot) for row in rows]
        for slab, slot in sources:
            slab.rows[slot] = None
        self.place(rows, capacity)
        pairs = zip(rows, sources, strict=True)
        self._copy([Move(slab, slot, row.place, row.slot, min(row.own, slab.capacity)) for row, (slab, slot) in pairs])
        for old in {slab.capacity for slab, _ in sources}:
            self._shrink(old)

    def vacate(self, rows: Sequence[RowCache]) -> None:
        """Take their slots from rows that end."""
        capacities = set()
        for row in rows:
            row.place.rows[row.slot] = None
            capacities.add(row.place.capacity)
            row.slab = None
        for capacity in capacities:
            self._shrink(capacity)

    def _new(self, capacity: int, slots: int) -> Slab:
        return Slab(capacity, slots, self._templates, together=not self._merge)

    def _vacant(self, capacity: int) -> list[tuple[Slab, int]]:
        """Vacant slots, in the fullest slab first, and there from the first on."""
        slabs = sorted(self._classes.get(capacity, []), key=lambda slab: slab.vacant)
        return [(slab, slot) for slab in slabs for slot, row in enumerate(slab.rows) if row is None]

    def _spare(self, capacity: int, rows: int) -> int:
        return min(spare_slots(capacity), rows // 8) if self._merge else spare_slots(capacity)

    def _most(self, capacity: int) -> int:
        """The most slots of a slab."""
        return max(1, (SLAB_TOKENS if self._merge or capacity <= SPARE_TOKENS else 0) // capacity)

    def _add(self, capacity: int, joining: int) -> None:
        """Add slabs for rows that join, with some slots to spare. If slabs are merged, rows of those that are not full
        move along."""
        slabs = self._classes.setdefault(capacity, [])
        most = self._most(capacity)
        # On two CPU cores, 8 rows of 1,500 tokens in four slabs took 72 ms per step, and 55 in one.
        merged = [slab for slab in slabs if len(slab.rows) < most] if self._merge else []
        rows = joining + sum(slab.used for slab in slabs)
        staying = [slab for slab in slabs if slab not in merged]
        missing = joining + sum(slab.used for slab in merged) - sum(slab.vacant for slab in staying)
        slots = missing + self._spare(capacity, rows)
        while missing > 0:
            slabs.append(self._new(capacity, min(slots, most)))
            missing, slots = missing - most, slots - most
        self._empty(capacity, merged)

    def _shrink(self, capacity: int) -> None:
        """Empty slabs while a class has more vacant slots than it may."""
        slabs = self._classes[capacity]
        slabs[:] = [slab for slab in slabs if slab.used]
        while slabs:
            rows = sum(slab.used for slab in slabs)
            vacant = sum(slab.vacant for slab in slabs)
            if vacant <= self._spare(capacity, rows):
                return
            sparsest = max(slabs, key=lambda slab: slab.vacant)
            if vacant - sparsest.vacant < sparsest.used:
                slabs.append(self._new(capacity, sparsest.used - (vacant - sparsest.vacant)))
            self._empty(capacity, [sparsest])

    def _empty(self, capacity: int, emptied: Sequence[Slab]) -> None:
        """Move the rows of some slabs to others of the class, and free them."""
        slabs = self._classes[capacity]
        slabs[:] = [slab for slab in slabs if slab not in emptied]
        targets = iter(self._vacant(capacity))
        moves = []
        for slab in emptied:
            for slot, row in enumerate(slab.rows):
                if row is not None:
                    target, target_slot = next(targets)
                    moves.append(Move(slab, slot, target, target_slot, row.columns))
                    _occupy(row, target, target_slot)
        if moves:
            self._copy(moves)


def _occupy(row: RowCache, slab: Slab, slot: int) -> None:
    row.slab, row.slot = slab, slot
    slab.rows[slot] = row
