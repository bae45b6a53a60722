"""Which blocks are on disk, and in which files. Pure: names and keys only.

A file has consecutive blocks of one chain and stands on the block before its first. Files leave as a whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Some blocks of a file: `count` of its `blocks`, from number `first` on."""

    name: str
    first: int
    count: int
    blocks: int

    @property
    def to_the_end(self) -> bool:
        """Whether it ends where its file ends: a checkpoint is of use only then."""
        return self.first + self.count == self.blocks


@dataclass(frozen=True, slots=True)
class _File:
    keys: tuple[str, ...]
    parent: str
    size: int


class DiskIndex:
    """At most `budget` bytes. The least recently used files leave.

    Whatever is touched makes what it stands on more recent than itself, so a beginning outlives its continuations.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes = 0
        self._files: OrderedDict[str, _File] = OrderedDict()  # the oldest first
        self._holders: dict[str, dict[str, int]] = {}  # a key to the files that have it, and where

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def holds(self, key: str) -> bool:
        return key in self._holders

    def match(self, keys: Sequence[str]) -> tuple[Piece, ...]:
        """The longest beginning of a chain that is here, in as few pieces as possible."""
        pieces: list[Piece] = []
        at = 0
        while at < len(keys) and keys[at] in self._holders:
            here = (self._piece(name, first, keys, at) for name, first in self._holders[keys[at]].items())
            longest = max(here, key=lambda piece: (piece.count, piece.to_the_end))
            pieces.append(longest)
            at += longest.count
        return tuple(pieces)

    def find(self, key: str) -> Piece | None:
        """A whole file that ends with this key: a checkpoint, whatever it stands on."""
        for name, number in self._holders.get(key, {}).items():
            blocks = len(self._files[name].keys)
            if number == blocks - 1:
                return Piece(name, 0, blocks, blocks)
        return None

    def touch(self, names: Iterable[str]) -> list[str]:
        """Make the files of a chain, from its beginning on, the most recent. Their names, end first."""
        ordered = [name for name in reversed(list(names)) if name in self._files]
        for name in ordered:
            self._files.move_to_end(name)
        return ordered

    def lineage(self, parent: str) -> list[str]:
        """The files that a block on `parent` stands on, from the beginning of the chain."""
        names: dict[str, None] = {}
        while parent in self._holders:
            _, name = max((number, name) for name, number in self._holders[parent].items())
            if name in names:
                raise ValueError("a chain that stands on itself")
            names[name] = None
            parent = self._files[name].parent
        return list(reversed(names))

    def evict_for(self, size: int, parent: str = "") -> list[str] | None:
        """Forget files until `size` more bytes fit; their names. None: they cannot, unless what they stand on goes."""
        spared = set(self.lineage(parent))
        excess = self.bytes + size - self.budget
        leaving: list[str] = []
        for name, file in self._files.items():
            if excess <= 0:
                break
            if name not in spared:
                leaving.append(name)
                excess -= file.size
        if excess > 0:
            return None
        for name in leaving:
            self.remove(name)
        return leaving

    def add(self, keys: Sequence[str], name: str, size: int, parent: str) -> list[str]:
        """A new file, the most recent but for what it stands on. Says which files those are, end first."""
        if not keys:
            raise ValueError("a file has at least one block")
        self.remove(name)
        self._files[name] = _File(tuple(keys), parent, size)
        self.bytes += size
        for number, key in enumerate(keys):
            self._holders.setdefault(key, {})[name] = number
        return self.touch(self.lineage(parent))

    def remove(self, name: str) -> bool:
        file = self._files.pop(name, None)
        if file is None:
            return False
        self.bytes -= file.size
        for key in file.keys:
            holders = self._holders[key]
            del holders[name]
            if not holders:
                del self._holders[key]
        return True

    def clear(self) -> list[str]:
        """Forget everything; the names that were there."""
        names = list(self._files)
        self._files.clear()
        self._holders.clear()
        self.bytes = 0
        return names

    def _piece(self, name: str, first: int, keys: Sequence[str], at: int) -> Piece:
        have = self._files[name].keys
        most = min(len(keys) - at, len(have) - first)
        count = next((n for n in range(most) if keys[at + n] != have[first + n]), most)
        return Piece(name, first, count, len(have))
