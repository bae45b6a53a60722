"""Names for blocks of tokens that say all that their keys and values depend on. Pure.

A block's key is a hash of the key before it, its tokens and what else stands at their places; the first stands on a key
of the model. So equal keys mean equal beginnings, in this process or in one that ended long ago.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from millstream.engine.prefix_cache.index import Contents

HASH_BYTES = 20
"""Nobody finds two beginnings with one key on purpose: that takes some 2**80 attempts."""


def root_hash(stamp: str) -> str:
    """What the first block of every chain stands on: the identity of the model, its adapter and its cache."""
    return hashlib.blake2b(stamp.encode(), digest_size=HASH_BYTES, person=b"millstream-root").hexdigest()


def block_hash(parent: str, tokens: Sequence[int], contents: Contents = ()) -> str:
    """The key of a block, whole or not. Places in `contents` count from its first token."""
    # Each part says how long it is, so that no two blocks have the same bytes.
    data = bytes.fromhex(parent) + struct.pack(f"<I{len(tokens)}i", len(tokens), *tokens)
    state = hashlib.blake2b(data, digest_size=HASH_BYTES, person=b"millstream-block")
    for place, name in sorted(contents):
        named = name.encode()
        state.update(struct.pack("<II", place, len(named)) + named)
    return state.hexdigest()


class BlockHashes:
    """The keys of one request's blocks, each computed once: the same beginning is asked for with every state that is
    saved of it, and it only grows."""

    def __init__(self, root: str, contents: Contents, block: int) -> None:
        self._block = block
        self._contents = contents
        self._keys = [root]

    def keys(self, tokens: Sequence[int]) -> list[str]:
        """The root's, and those of all whole blocks of `tokens`, which go on from what was asked for before, or are a
        beginning of it."""
        whole = len(tokens) // self._block
        known = len(self._keys) - 1
        if known < whole:
            start, end = known * self._block, whole * self._block
            later = [(place - start, name) for place, name in self._contents if start <= place < end]
            self._keys += block_hashes(self._keys[-1], tokens[start:end], later, self._block)
        return self._keys[: whole + 1]


def block_hashes(parent: str, tokens: Sequence[int], contents: Contents, block: int) -> tuple[str, ...]:
    """The keys of all blocks of `tokens`; what is left over at the end is a block as well, a shorter one."""
    keys: list[str] = []
    for start in range(0, len(tokens), block):
        inside = contents and [(place - start, name) for place, name in contents if start <= place < start + block]
        parent = block_hash(parent, tokens[start : start + block], inside)
        keys.append(parent)
    return tuple(keys)
