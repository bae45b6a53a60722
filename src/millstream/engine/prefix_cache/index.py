"""The index of the prefix cache: a tree of KV blocks, from tokens to handles. LRU eviction within a byte budget. Pure.

Tokens are cut into blocks, and blocks form a tree: a prefix that many prompts share is there once. Media in a prompt
also change keys and values, so their hashes are part of the block where they stand, and thereby of all later blocks.

Full attention can continue from any block. A sliding window or a recurrent state cannot be cut: such models continue
from a checkpoint, which hangs on the last whole block before its position, by the tokens that follow that block.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Contents = Sequence[tuple[int, str]]
"""Media in a prompt: (position, hash)."""

_Key = tuple[tuple[int, ...], tuple[tuple[int, str], ...]]


@dataclass(slots=True, eq=False)
class _Node:
    handle: int
    parent: _Node | None
    key: _Key
    size: int = 0
    children: dict[_Key, _Node] = field(default_factory=dict)
    checkpoints: dict[_Key, _Node] = field(default_factory=dict)
    users: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """The cached prefix of a prompt. It is not evicted until it is released."""

    tokens: int = 0
    handles: tuple[int, ...] = ()
    checkpoint: int | None = None
    shared: int = 0
    """Tokens that match a cached prefix, whether or not generation can continue from there."""


@dataclass(frozen=True, slots=True)
class Inserted:
    """What an insertion asks of the backend: save blocks `first` and on under `handles`, then evict `evicted`."""

    first: int = 0
    handles: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()
    checkpoint: int | None = None


class PrefixIndex:
    """Blocks of `block` tokens and `block_bytes` each, at most `budget` bytes in all. Evicts the least recently used.

    A touched chain is made recent from its end to its start, so a block is never more recent than its parent: the
    oldest unused node is a leaf.
    """

    def __init__(
        self, *, block: int, block_bytes: int, budget: int, least: int = 1, from_checkpoints: bool = False
    ) -> None:
        """`least`: new blocks that make a save worth its copy. `from_checkpoints`: prompts continue from checkpoints
        only."""
        if block < 1 or block_bytes < 1:
            raise ValueError("a block has at least one token and one byte")
        self.block = block
        self.least = least
        self.from_checkpoints = from_checkpoints
        self.nbytes = 0
        self._block_bytes = block_bytes
        self._budget = budget
        self._root = _Node(-1, None, ((), ()))
        self._recent: OrderedDict[int, _Node] = OrderedDict()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._recent)

    def match(self, tokens: Sequence[int], contents: Contents = ()) -> Hit:
        """The longest cached prefix of `tokens` that generation can continue from."""
        chain = self._walk(tokens, contents)
        shared = len(chain) * self.block
        checkpoint = None
        if self.from_checkpoints:
            chain, checkpoint = self._last_checkpoint(chain, tokens, contents)
        used = chain if checkpoint is None else [*chain, checkpoint]
        for node in used:
            node.users += 1
        self._touch(used)
        end = len(chain) * self.block + (0 if checkpoint is None else len(checkpoint.key[0]))
        return Hit(end, tuple(node.handle for node in chain), None if checkpoint is None else checkpoint.handle, shared)

    def release(self, hit: Hit) -> None:
        for handle in hit.handles if hit.checkpoint is None else (*hit.handles, hit.checkpoint):
            if (node := self._recent.get(handle)) is not None:
                node.users -= 1

    def insert(
        self,
        tokens: Sequence[int],
        contents: Contents = (),
        checkpoint_bytes: int | None = None,
        *,
        least: int | None = None,
    ) -> Inserted:
        """Insert all whole blocks of `tokens`, as far as the budget allows, and a checkpoint at their end if its size
        is given. With fewer than `least` new blocks nothing is inserted, unless there is a checkpoint."""
        chain = self._walk(tokens, contents)
        first, whole = len(chain), len(tokens) // self.block
        if checkpoint_bytes is None and whole - first < (self.least if least is None else least):
            self._touch(chain)
            return Inserted(first)
        evicted: list[int] = []
        for node in chain:
            node.users += 1
        for number in range(first, whole):
            added = self._add(chain, self._key(tokens, contents, number), evicted)
            if added is None:
                break
            chain.append(added)
        fresh = tuple(node.handle for node in chain[first:])
        checkpoint = None
        if checkpoint_bytes is not None and len(chain) == whole:
            checkpoint = self._add_checkpoint(chain, self._key(tokens, contents, whole), checkpoint_bytes, evicted)
        for node in chain:
            node.users -= 1
        self._touch(chain)
        return Inserted(first, fresh, tuple(evicted), checkpoint)

    def remove(self, handles: Iterable[int]) -> list[int]:
        """Remove nodes that the backend does not have, with their descendants. Returns the handles left to evict."""
        missing = set(handles)
        gone: list[int] = []
        for handle in missing:
            if (node := self._recent.get(handle)) is not None:
                below = [each.handle for each in _subtree(node)]
                for each in below:
                    self._unlink(self._recent[each])
                gone += below
        return [handle for handle in gone if handle not in missing]

    def clear(self) -> tuple[int, ...]:
        """Remove everything. Returns the handles that were there."""
        handles = tuple(self._recent)
        self._recent.clear()
        self._root.children.clear()
        self._root.checkpoints.clear()
        self.nbytes = 0
        return handles

    def _walk(self, tokens: Sequence[int], contents: Contents) -> list[_Node]:
        chain: list[_Node] = []
        children, block = self._root.children, self.block
        for start in range(0, len(tokens) - block + 1, block):
            found = children.get(self._part(tokens, contents, start, start + block))
            if found is None:
                break
            chain.append(found)
            children = found.children
        return chain

    def _last_checkpoint(
        self, chain: list[_Node], tokens: Sequence[int], contents: Contents
    ) -> tuple[list[_Node], _Node | None]:
        """The furthest checkpoint along the chain, and the chain up to it."""
        for depth in range(len(chain), -1, -1):
            node = chain[depth - 1] if depth else self._root
            start = depth * self.block
            fitting = [
                checkpoint
                for (tail, _), checkpoint in node.checkpoints.items()
                if checkpoint.key == self._part(tokens, contents, start, start + len(tail))
            ]
            if fitting:
                return chain[:depth], max(fitting, key=lambda checkpoint: len(checkpoint.key[0]))
        return [], None

    def _key(self, tokens: Sequence[int], contents: Contents, number: int) -> _Key:
        return self._part(tokens, contents, number * self.block, (number + 1) * self.block)

    @staticmethod
    def _part(tokens: Sequence[int], contents: Contents, start: int, end: int) -> _Key:
        if not contents:
            return tuple(tokens[start:end]), ()
        inside = tuple(
            (position - start, name) for position, name in contents if start <= position < min(end, len(tokens))
        )
        return tuple(tokens[start:end]), inside

    def _add(self, chain: Sequence[_Node], key: _Key, evicted: list[int]) -> _Node | None:
        """Append a block to a chain, in use until the caller is done. Returns None if the budget is full."""
        if not self._evict_for(self._block_bytes, evicted):
            return None
        parent = chain[-1] if chain else self._root
        node = _Node(next(self._numbers), parent, key, self._block_bytes, users=1)
        parent.children[key] = node
        self._register(node)
        return node

    def _add_checkpoint(self, chain: Sequence[_Node], key: _Key, size: int, evicted: list[int]) -> int | None:
        """Returns None if it is there already or does not fit."""
        parent = chain[-1] if chain else self._root
        if (known := parent.checkpoints.get(key)) is not None:
            self._touch([known])
            return None
        if not self._evict_for(size, evicted):
            return None
        node = _Node(next(self._numbers), parent, key, size)
        parent.checkpoints[key] = node
        self._register(node)
        return node.handle

    def _register(self, node: _Node) -> None:
        self._recent[node.handle] = node
        self.nbytes += node.size

    def _touch(self, chain: Sequence[_Node]) -> None:
        for node in reversed(chain):
            self._recent.move_to_end(node.handle)

    def _evict_for(self, size: int, evicted: list[int]) -> bool:
        """Evict until `size` fits. Returns False if it cannot."""
        if size > self._budget:
            return False
        while self.nbytes + size > self._budget:
            oldest = next((node for node in self._recent.values() if not node.users), None)
            if oldest is None:
                return False
            evicted.append(oldest.handle)
            self._unlink(oldest)
        return True

    def _unlink(self, node: _Node) -> None:
        assert node.parent is not None, "the root is not in the list"
        del self._recent[node.handle]
        self.nbytes -= node.size
        siblings = node.parent.checkpoints if node.parent.checkpoints.get(node.key) is node else node.parent.children
        del siblings[node.key]


def _subtree(node: _Node) -> list[_Node]:
    """A node and its descendants, the node last."""
    found, unseen = [], [node]
    while unseen:
        found.append(unseen.pop())
        unseen += [*found[-1].checkpoints.values(), *found[-1].children.values()]
    return found[::-1]
