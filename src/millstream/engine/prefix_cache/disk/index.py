"""The index of the disk tier: which KV blocks are in which files, with LRU eviction within a byte budget. Pure.

A file has consecutive blocks of one prefix, and its parent is the block before its first. Files are evicted whole. Keys
are block hashes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of the blocks in a file: `count` of its `blocks`, from number `first`."""

    name: str
    first: int
    count: int
    blocks: int

    @property
    def reaches_end(self) -> bool:
        """True if it ends with the last block of its file: a checkpoint is usable only then."""
        return self.first + self.count == self.blocks


@dataclass(frozen=True, slots=True)
class _File:
    keys: tuple[str, ...]
    parent: str
    size: int


class DiskIndex:
    """At most `budget` bytes. Evicts the least recently used files.

    Touching a file makes its ancestors more recent than itself, so a prefix outlives its continuations.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes = 0
        self._files: OrderedDict[str, _File] = OrderedDict()  # least recently used first
        self._locations: dict[str, dict[str, int]] = {}  # key -> file -> number of the block in it

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def holds(self, key: str) -> bool:
        return key in self._locations

    def match(self, keys: Sequence[str]) -> tuple[Piece, ...]:
        """The longest prefix of `keys` that is on disk, in as few pieces as possible."""
        pieces: list[Piece] = []
        start = 0
        while start < len(keys) and keys[start] in self._locations:
            candidates = (self._piece(name, first, keys, start) for name, first in self._locations[keys[start]].items())
            longest = max(candidates, key=lambda piece: (piece.count, piece.reaches_end))
            pieces.append(longest)
            start += longest.count
        return tuple(pieces)

    def find(self, key: str) -> Piece | None:
        """The whole of a file that ends with this key, such as a checkpoint. Its ancestors need not be on disk."""
        for name, number in self._locations.get(key, {}).items():
            blocks = len(self._files[name].keys)
            if number == blocks - 1:
                return Piece(name, 0, blocks, blocks)
        return None

    def touch(self, names: Iterable[str]) -> list[str]:
        """Make the files of one prefix the most recent. `names` are in the order of the prefix; returned last first."""
        ordered = [name for name in reversed(list(names)) if name in self._files]
        for name in ordered:
            self._files.move_to_end(name)
        return ordered

    def ancestors(self, parent: str) -> list[str]:
        """The files of the prefix that ends with the block `parent`, first to last."""
        names: dict[str, None] = {}
        while parent in self._locations:
            _, name = max((number, name) for name, number in self._locations[parent].items())
            if name in names:
                raise ValueError("a file is its own ancestor")
            names[name] = None
            parent = self._files[name].parent
        return list(reversed(names))

    def evict_for(self, size: int, parent: str = "") -> list[str] | None:
        """Evict files until `size` more bytes fit; returns their names. Returns None, and evicts nothing, if ancestors
        of `parent` would have to go."""
        protected = set(self.ancestors(parent))
        excess = self.bytes + size - self.budget
        evicted: list[str] = []
        for name, file in self._files.items():
            if excess <= 0:
                break
            if name not in protected:
                evicted.append(name)
                excess -= file.size
        if excess > 0:
            return None
        for name in evicted:
            self.remove(name)
        return evicted

    def add(self, keys: Sequence[str], name: str, size: int, parent: str) -> list[str]:
        """Add a file as the most recent but for its ancestors; returns their names, last first."""
        if not keys:
            raise ValueError("a file has at least one block")
        self.remove(name)
        self._files[name] = _File(tuple(keys), parent, size)
        self.bytes += size
        for number, key in enumerate(keys):
            self._locations.setdefault(key, {})[name] = number
        return self.touch(self.ancestors(parent))

    def remove(self, name: str) -> bool:
        file = self._files.pop(name, None)
        if file is None:
            return False
        self.bytes -= file.size
        for key in file.keys:
            files = self._locations[key]
            del files[name]
            if not files:
                del self._locations[key]
        return True

    def clear(self) -> list[str]:
        """Remove all files; returns their names."""
        names = list(self._files)
        self._files.clear()
        self._locations.clear()
        self.bytes = 0
        return names

    def _piece(self, name: str, first: int, keys: Sequence[str], start: int) -> Piece:
        """The blocks of a file, from number `first`, that match `keys` from `start`."""
        stored = self._files[name].keys
        most = min(len(keys) - start, len(stored) - first)
        count = next((n for n in range(most) if keys[start + n] != stored[first + n]), most)
        return Piece(name, first, count, len(stored))
