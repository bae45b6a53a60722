"""Which beginnings of prompts are kept. A pure index from tokens to handles; the backend holds what they stand for.

Tokens are cut into blocks, and blocks form a tree: a beginning that many prompts share is there once. What else changes
keys and values (an image, a sound) is part of the block at whose place it stands, and so of all blocks after it.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

Contents = Sequence[tuple[int, str]]
"""What stands at a place of a prompt besides its token: (place, hash)."""

_Key = tuple[tuple[int, ...], tuple[tuple[int, str], ...]]


@dataclass(slots=True, eq=False)
class _Block:
    handle: int
    parent: _Block | None
    key: _Key
    children: dict[_Key, _Block] = field(default_factory=dict)
    users: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """The kept beginning of a prompt. Whoever has it must `release` it: until then it is not evicted."""

    tokens: int = 0
    handles: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """What an insertion asks of the backend: keep blocks `first` and on under `handles`, then forget `evicted`."""

    first: int = 0
    handles: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()


class PrefixIndex:
    """`block` tokens to a block of `block_bytes`; all together at most `budget` bytes. The least recently used leave.

    A touched chain is made recent from its end to its beginning, so a block is never more recent than what it stands
    on: the oldest block that nobody uses is a leaf.
    """

    def __init__(self, *, block: int, block_bytes: int, budget: int, least: int = 1) -> None:
        """`least`: how many blocks there must be to keep, for it to be worth the copy."""
        if block < 1 or block_bytes < 1:
            raise ValueError("a block has at least one token and one byte")
        self.block = block
        self._most = budget // block_bytes
        self._least = least
        self._root = _Block(-1, None, ((), ()))
        self._recent: OrderedDict[int, _Block] = OrderedDict()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._recent)

    def match(self, tokens: Sequence[int], contents: Contents = ()) -> Hit:
        """The longest kept beginning of `tokens`, in whole blocks."""
        chain = self._walk(tokens, contents)
        for block in chain:
            block.users += 1
        self._touch(chain)
        return Hit(len(chain) * self.block, tuple(block.handle for block in chain))

    def release(self, hit: Hit) -> None:
        for handle in hit.handles:
            if (block := self._recent.get(handle)) is not None:
                block.users -= 1

    def insert(self, tokens: Sequence[int], contents: Contents = ()) -> Kept:
        """Keep all whole blocks of `tokens`, as far as the budget goes."""
        chain = self._walk(tokens, contents)
        first = len(chain)
        if len(tokens) // self.block - first < self._least:
            self._touch(chain)
            return Kept(first)
        fresh: list[int] = []
        evicted: list[int] = []
        for block in chain:
            block.users += 1
        for number in range(first, len(tokens) // self.block):
            if len(self._recent) >= self._most and not self._evict_one(evicted):
                break
            parent = chain[-1] if chain else self._root
            block = _Block(next(self._numbers), parent, self._key(tokens, contents, number), users=1)
            parent.children[block.key] = block
            self._recent[block.handle] = block
            chain.append(block)
            fresh.append(block.handle)
        for block in chain:
            block.users -= 1
        self._touch(chain)
        return Kept(first, tuple(fresh), tuple(evicted))

    def clear(self) -> tuple[int, ...]:
        """Forget everything; the handles that were there."""
        handles = tuple(self._recent)
        self._recent.clear()
        self._root.children.clear()
        return handles

    def _walk(self, tokens: Sequence[int], contents: Contents) -> list[_Block]:
        chain: list[_Block] = []
        at = self._root
        for number in range(len(tokens) // self.block):
            found = at.children.get(self._key(tokens, contents, number))
            if found is None:
                break
            chain.append(found)
            at = found
        return chain

    def _key(self, tokens: Sequence[int], contents: Contents, number: int) -> _Key:
        start, end = number * self.block, (number + 1) * self.block
        inside = tuple((place - start, name) for place, name in contents if start <= place < end)
        return tuple(tokens[start:end]), inside

    def _touch(self, chain: Sequence[_Block]) -> None:
        for block in reversed(chain):
            self._recent.move_to_end(block.handle)

    def _evict_one(self, evicted: list[int]) -> bool:
        oldest = next((block for block in self._recent.values() if not block.users), None)
        if oldest is None or oldest.parent is None:
            return False
        del self._recent[oldest.handle]
        del oldest.parent.children[oldest.key]
        evicted.append(oldest.handle)
        return True
