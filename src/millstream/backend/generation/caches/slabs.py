"""Slabs: the memory of the KV cache, allocated by length class. Owner only.

A slab has some slots of one capacity (`kv_capacity`); a row's tokens stand in one slot, from column 0 on. A slab is
never copied to grow: rows that find no vacant slot get a new slab, and a row that outgrows its slot moves, alone, to
one of the next class. Slots that rows leave are filled first, and what is too sparse is emptied, so that the memory
follows the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from millstream.engine.generation.kv_capacity import KEPT_TOKENS, SPARE_TOKENS, slot_capacity, spare_slots

Parts = tuple[mx.array, ...]
"""The KV cache of a layer, tokens on axis 2: keys and values, or the packed weights, scales and biases of each."""

SLAB_TOKENS = 16384
"""The most tokens of a slab with several slots. Longer rows have a slab of their own."""

FEWEST_SLOTS = 8
"""Of a slab, where vacant slots may be kept."""

MOST_ELEMENTS = 2**31 - 1
"""Of an array that many layers share: MLX counts larger ones in other kernels, which nobody has tried."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """How the parts of a slab lie in what is allocated."""

    kinds: tuple[tuple[int, int, int, mx.Dtype], ...]
    """Of each buffer: how many parts it has, and the heads, the size and the type of each."""
    which: tuple[int, ...]
    """For each part of each layer: its buffer."""
    units: tuple[int, ...]
    """And its place there in bytes, if a slab had room for one token."""


class SlabForm:
    """What all slabs of a pool have in common. `templates`: arrays whose heads, size and type the parts get.
    `together`: parts that are alike are views of one array, which a GPU allocates and clears at once; only if nothing
    but kernels writes to them."""

    def __init__(self, templates: Sequence[Parts], *, together: bool) -> None:
        self.parts = [part for parts in templates for part in parts]
        self.layers = [len(parts) for parts in templates]
        self.most_heads = max((part.shape[1] for part in self.parts), default=0)
        self._kinds = [(part.shape[1], part.shape[3], part.dtype) for part in self.parts]
        self._counts = Counter(self._kinds)
        self._together = together
        self._found: dict[frozenset[tuple[int, int, mx.Dtype]], Buffers] = {}

    def buffers(self, tokens: int) -> Buffers:
        """Those of a slab with room for so many tokens."""
        together = frozenset(
            kind
            for kind, count in self._counts.items()
            if self._together and count * tokens * kind[0] * kind[1] <= MOST_ELEMENTS
        )
        if together not in self._found:
            self._found[together] = self._arranged(together)
        return self._found[together]

    def _arranged(self, together: frozenset[tuple[int, int, mx.Dtype]]) -> Buffers:
        kinds: list[tuple[int, int, int, mx.Dtype]] = []
        numbers: dict[tuple[int, int, mx.Dtype], int] = {}
        taken: Counter[int] = Counter()
        which, units = [], []
        for kind in self._kinds:
            if kind not in together or kind not in numbers:
                numbers[kind] = len(kinds)
                kinds.append((self._counts[kind] if kind in together else 1, *kind))
            buffer, (heads, size, dtype) = numbers[kind], kind
            which.append(buffer)
            units.append(taken[buffer] * heads * size * dtype.size)
            taken[buffer] += 1
        return Buffers(tuple(kinds), tuple(which), tuple(units))


class Slab:
    """Memory for some rows of one class: per layer and part, (slots, heads, capacity, size)."""

    __slots__ = ("_layers", "arranged", "buffers", "capacity", "form", "nbytes", "rows", "used")

    def __init__(self, capacity: int, slots: int, form: SlabForm) -> None:
        self.capacity = capacity
        self.form = form
        self.rows: list[RowCache | None] = [None] * slots
        self.used = 0
        self.arranged = form.buffers(slots * capacity)
        shapes = [((slots, heads, capacity, size), count, dtype) for count, heads, size, dtype in self.arranged.kinds]
        self.buffers = [
            mx.zeros((count, *shape) if count > 1 else shape, dtype=dtype) for shape, count, dtype in shapes
        ]
        """What is allocated."""
        self.nbytes = sum(buffer.nbytes for buffer in self.buffers)
        self._layers: list[list[mx.array]] | None = None

    @property
    def layers(self) -> list[list[mx.array]]:
        """The parts of each layer: views, made when they are first asked for. Kernels have addresses instead."""
        if self._layers is None:
            taken: Counter[int] = Counter()
            parts: list[mx.array] = []
            for number in self.arranged.which:
                buffer, at = self.buffers[number], taken[number]
                taken[number] += 1
                # `[at]` would be a copy.
                parts.append(buffer if buffer.ndim == 4 else mx.squeeze(buffer[at : at + 1], axis=0))
            found = iter(parts)
            self._layers = [[next(found) for _ in range(count)] for count in self.form.layers]
        return self._layers

    @property
    def vacant(self) -> int:
        return len(self.rows) - self.used

    @property
    def arrays(self) -> list[mx.array]:
        return [part for parts in self.layers for part in parts]

    def occupy(self, slot: int, row: RowCache) -> None:
        """Give a vacant slot to a row, which may have another one until now."""
        assert self.rows[slot] is None, "the slot is not vacant"
        self.rows[slot] = row
        self.used += 1
        row.slab, row.slot = self, slot

    def vacate(self, slot: int) -> None:
        assert self.rows[slot] is not None, "the slot is vacant"
        self.rows[slot] = None
        self.used -= 1


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
    items: tuple[int, int, bytes] | None = None
    """Its work items in its slot, as `KernelStep` has found them."""
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
    """All slabs of a batch. `copy` runs moves, `free` is told of slabs that are no longer here; `merge`: have few slabs
    per class, as full as can be, since each costs a call and vacant slots are computed. Otherwise slabs cost nothing,
    and moves are what is saved."""

    def __init__(
        self,
        templates: Sequence[Parts],
        copy: Callable[[Sequence[Move]], None],
        free: Callable[[Slab], None],
        *,
        merge: bool,
    ) -> None:
        self._form = SlabForm(templates, together=not merge)
        self._copy = copy
        self._free = free
        self._merge = merge
        self._keeps = False
        self._classes: dict[int, list[Slab]] = {}

    def __iter__(self) -> Iterator[Slab]:
        for slabs in self._classes.values():
            yield from slabs

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self)

    def keep_vacant(self, allowed: bool) -> bool:
        """Whether `KEPT_TOKENS` may be vacant, so that hardly any row moves when others leave, and rows that join find
        slots. Returns whether rows may have moved."""
        allowed = allowed and not self._merge
        shrinks, self._keeps = self._keeps and not allowed, allowed
        for capacity in self._classes if shrinks else ():
            self._shrink(capacity)
        return shrinks

    def place(self, rows: Sequence[RowCache], capacity: int) -> None:
        """Give new rows slots of a class."""
        vacant = self._vacant(capacity)
        if len(rows) > len(vacant):
            self._add(capacity, len(rows))
            vacant = self._vacant(capacity)
        for row, (slab, slot) in zip(rows, vacant, strict=False):
            slab.occupy(slot, row)

    def move(self, rows: Sequence[RowCache], capacity: int) -> None:
        """Move rows to slots of another class. Some at a time: until their old slabs are freed, they exist twice."""
        at_once = max(1, SLAB_TOKENS // capacity)
        for first in range(0, len(rows), at_once):
            self._move(rows[first : first + at_once], capacity)

    def _move(self, rows: Sequence[RowCache], capacity: int) -> None:
        sources = [(row.place, row.slot) for row in rows]
        for slab, slot in sources:
            slab.vacate(slot)
        self.place(rows, capacity)
        pairs = zip(rows, sources, strict=True)
        self._copy([Move(slab, slot, row.place, row.slot, min(row.own, slab.capacity)) for row, (slab, slot) in pairs])
        for old in {slab.capacity for slab, _ in sources}:
            self._shrink(old)

    def vacate(self, rows: Sequence[RowCache]) -> None:
        """Take their slots from rows that end."""
        capacities = set()
        for row in rows:
            row.place.vacate(row.slot)
            capacities.add(row.place.capacity)
            row.slab = None
        if not any(slab.used for slab in self):
            capacities = set(self._classes)
        for capacity in capacities:
            self._shrink(capacity)

    def _vacant(self, capacity: int) -> list[tuple[Slab, int]]:
        """Vacant slots, in the fullest slab first, and there from the first on."""
        slabs = sorted(self._classes.get(capacity, []), key=lambda slab: slab.vacant)
        return [(slab, slot) for slab in slabs if slab.vacant for slot, row in enumerate(slab.rows) if row is None]

    def _spare(self, capacity: int, rows: int) -> int:
        return min(spare_slots(capacity), rows // 8) if self._merge else spare_slots(capacity)

    def _most(self, capacity: int) -> int:
        """The most slots of a slab."""
        return max(1, (SLAB_TOKENS if self._merge or capacity <= SPARE_TOKENS else 0) // capacity)

    def _kept_room(self) -> int:
        """How many more tokens may be vacant; below zero: how many are too many. Nothing is kept for no rows."""
        if not self._keeps or not any(slab.used for slab in self):
            return -1
        return KEPT_TOKENS - sum(slab.vacant * slab.capacity for slab in self)

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
        slots = self._slots(capacity, missing, rows)
        while missing > 0:
            slabs.append(Slab(capacity, min(slots, most), self._form))
            missing, slots = missing - most, slots - most
        self._empty(capacity, merged)

    def _slots(self, capacity: int, missing: int, rows: int) -> int:
        """How many slots to add. Where vacant ones may be kept, so many that a burst of rows makes few slabs, and slabs
        have few sizes: every other one is memory that CUDA allocates."""
        slots = missing + self._spare(capacity, rows)
        if not self._keeps:
            return slots
        wanted = max(FEWEST_SLOTS, 1 << (max(slots, rows) - 1).bit_length())
        vacant = sum(slab.vacant * slab.capacity for slab in self)
        return max(slots, min(wanted, missing + (KEPT_TOKENS - vacant) // capacity))

    def _shrink(self, capacity: int) -> None:
        """Empty slabs while a class has more vacant slots than it may."""
        if self._kept_room() >= 0:
            return
        for slabs in self._classes.values() if self._keeps else [self._classes[capacity]]:
            self._remove(slabs, [slab for slab in slabs if not slab.used])
        if self._kept_room() >= 0:
            return
        slabs = self._classes[capacity]
        while slabs:
            rows = sum(slab.used for slab in slabs)
            vacant = sum(slab.vacant for slab in slabs)
            if vacant <= self._spare(capacity, rows):
                return
            sparsest = max(slabs, key=lambda slab: slab.vacant)
            if vacant - sparsest.vacant < sparsest.used:
                slots = sparsest.used - (vacant - sparsest.vacant)
                slabs.append(Slab(capacity, slots, self._form))
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
                    target.occupy(target_slot, row)
        if moves:
            self._copy(moves)
        for slab in emptied:
            self._free(slab)

    def _remove(self, slabs: list[Slab], removed: Sequence[Slab]) -> None:
        slabs[:] = [slab for slab in slabs if slab not in removed]
        for slab in removed:
            self._free(slab)
