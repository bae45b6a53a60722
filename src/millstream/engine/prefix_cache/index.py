"""Which beginnings of prompts are kept. A pure index from tokens to handles; the backend holds what they stand for.

Tokens are cut into blocks, and blocks form a tree: a beginning that many prompts share is there once. What else changes
keys and values (an image, a sound) is part of the block at whose place it stands, and so of all blocks after it.

Full attention can go on from any block. A window or a recurrent state cannot be cut: such models go on from a state
that was saved at some place. A state hangs on the last whole block before its place, by the tokens that follow it.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Contents = Sequence[tuple[int, str]]
"""What stands at a place of a prompt besides its token: (place, hash)."""

_Key = tuple[tuple[int, ...], tuple[tuple[int, str], ...]]


@dataclass(slots=True, eq=False)
class _Node:
    handle: int
    parent: _Node | None
    key: _Key
    size: int = 0
    children: dict[_Key, _Node] = field(default_factory=dict)
    states: dict[_Key, _Node] = field(default_factory=dict)
    users: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """The kept beginning of a prompt. Whoever has it must `release` it: until then it is not evicted."""

    tokens: int = 0
    handles: tuple[int, ...] = ()
    state: int | None = None
    shared: int = 0
    """How many tokens begin like something that was read before, whether or not one can go on from there."""


@dataclass(frozen=True, slots=True)
class Inserted:
    """What an insertion asks of the backend: keep blocks `first` and on under `handles`, then forget `evicted`."""

    first: int = 0
    handles: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()
    state: int | None = None


class PrefixIndex:
    """`block` tokens to a block of `block_bytes`; all together at most `budget` bytes. The least recently used leave.

    A touched chain is made recent from its end to its beginning, so a block is never more recent than what it stands
    on: the oldest node that nobody uses is a leaf.
    """

    def __init__(self, *, block: int, block_bytes: int, budget: int, least: int = 1, from_states: bool = False) -> None:
        """`least`: how many blocks there must be to keep, for it to be worth the copy. `from_states`: prompts can go
        on from saved states only."""
        if block < 1 or block_bytes < 1:
            raise ValueError("a block has at least one token and one byte")
        self.block = block
        self.least = least
        self.from_states = from_states
        self.nbytes = 0
        self._block_bytes = block_bytes
        self._budget = budget
        self._root = _Node(-1, None, ((), ()))
        self._recent: OrderedDict[int, _Node] = OrderedDict()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._recent)

    def match(self, tokens: Sequence[int], contents: Contents = ()) -> Hit:
        """The longest kept beginning of `tokens` that one can go on from."""
        chain = self._walk(tokens, contents)
        shared = len(chain) * self.block
        state = None
        if self.from_states:
            chain, state = self._last_state(chain, tokens, contents)
        used = chain if state is None else [*chain, state]
        for node in used:
            node.users += 1
        self._touch(used)
        end = len(chain) * self.block + (0 if state is None else len(state.key[0]))
        return Hit(end, tuple(node.handle for node in chain), None if state is None else state.handle, shared)

    def release(self, hit: Hit) -> None:
        for handle in hit.handles if hit.state is None else (*hit.handles, hit.state):
            if (node := self._recent.get(handle)) is not None:
                node.users -= 1

    def insert(
        self,
        tokens: Sequence[int],
        contents: Contents = (),
        state_bytes: int | None = None,
        *,
        least: int | None = None,
    ) -> Inserted:
        """Keep all whole blocks of `tokens`, as far as the budget goes, and then a state at their very end if its size
        is given. Without `least` new blocks nothing is kept, unless there is a state to keep."""
        chain = self._walk(tokens, contents)
        first, whole = len(chain), len(tokens) // self.block
        if state_bytes is None and whole - first < (self.least if least is None else least):
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
        state = None
        if state_bytes is not None and len(chain) == whole:
            state = self._add_state(chain, self._key(tokens, contents, whole), state_bytes, evicted)
        for node in chain:
            node.users -= 1
        self._touch(chain)
        return Inserted(first, fresh, tuple(evicted), state)

    def remove(self, handles: Iterable[int]) -> list[int]:
        """The backend does not have these; what stands on them goes too. The handles that are left to forget."""
        missing = set(handles)
        gone: list[int] = []
        for handle in missing:
            if (node := self._recent.get(handle)) is not None:
                below = [each.handle for each in _family(node)]
                for each in below:
                    self._unlink(self._recent[each])
                gone += below
        return [handle for handle in gone if handle not in missing]

    def clear(self) -> tuple[int, ...]:
        """Forget everything; the handles that were there."""
        handles = tuple(self._recent)
        self._recent.clear()
        self._root.children.clear()
        self._root.states.clear()
        self.nbytes = 0
        return handles

    def _walk(self, tokens: Sequence[int], contents: Contents) -> list[_Node]:
        chain: list[_Node] = []
        at = self._root
        for number in range(len(tokens) // self.block):
            found = at.children.get(self._key(tokens, contents, number))
            if found is None:
                break
            chain.append(found)
            at = found
        return chain

    def _last_state(
        self, chain: list[_Node], tokens: Sequence[int], contents: Contents
    ) -> tuple[list[_Node], _Node | None]:
        """The furthest state along the chain, and the chain up to it."""
        for depth in range(len(chain), -1, -1):
            node = chain[depth - 1] if depth else self._root
            start = depth * self.block
            fitting = [
                state
                for (tail, _), state in node.states.items()
                if state.key == self._part(tokens, contents, start, start + len(tail))
            ]
            if fitting:
                return chain[:depth], max(fitting, key=lambda state: len(state.key[0]))
        return [], None

    def _key(self, tokens: Sequence[int], contents: Contents, number: int) -> _Key:
        return self._part(tokens, contents, number * self.block, (number + 1) * self.block)

    @staticmethod
    def _part(tokens: Sequence[int], contents: Contents, start: int, end: int) -> _Key:
        if not contents:
            return tuple(tokens[start:end]), ()
        inside = tuple((place - start, name) for place, name in contents if start <= place < min(end, len(tokens)))
        return tuple(tokens[start:end]), inside

    def _add(self, chain: Sequence[_Node], key: _Key, evicted: list[int]) -> _Node | None:
        """One more block at the end of a chain, in use until the caller is done; None if there is no room."""
        if not self._make_room(self._block_bytes, evicted):
            return None
        parent = chain[-1] if chain else self._root
        node = _Node(next(self._numbers), parent, key, self._block_bytes, users=1)
        parent.children[key] = node
        self._register(node)
        return node

    def _add_state(self, chain: Sequence[_Node], key: _Key, size: int, evicted: list[int]) -> int | None:
        """None if it is there already, or does not fit."""
        parent = chain[-1] if chain else self._root
        if (known := parent.states.get(key)) is not None:
            self._touch([known])
            return None
        if not self._make_room(size, evicted):
            return None
        node = _Node(next(self._numbers), parent, key, size)
        parent.states[key] = node
        self._register(node)
        return node.handle

    def _register(self, node: _Node) -> None:
        self._recent[node.handle] = node
        self.nbytes += node.size

    def _touch(self, chain: Sequence[_Node]) -> None:
        for node in reversed(chain):
            self._recent.move_to_end(node.handle)

    def _make_room(self, size: int, evicted: list[int]) -> bool:
        """Evict until `size` fits. If it never can, nothing more than needed to see that has gone."""
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
        siblings = node.parent.states if node.parent.states.get(node.key) is node else node.parent.children
        del siblings[node.key]


def _family(node: _Node) -> list[_Node]:
    """What stands on a node, and the node, which comes last."""
    found, unseen = [], [node]
    while unseen:
        found.append(unseen.pop())
        unseen += [*found[-1].states.values(), *found[-1].children.values()]
    return found[::-1]
