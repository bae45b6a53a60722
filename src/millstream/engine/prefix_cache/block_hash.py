"""Block hashes: names for KV blocks that cover everything their contents depend on. Pure.

The hash of a block covers the hash before it, its tokens and its media; the first covers the model's identity. Equal
hashes mean equal prefixes, in this process or in an earlier one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from millstream.engine.prefix_cache.index import Contents

HASH_BYTES = 20
"""A collision on purpose would take some 2**80 attempts."""


def root_hash(stamp: str) -> str:
    """The parent of the first block: the identity of the model, its adapter and its KV cache format."""
    return hashlib.blake2b(stamp.encode(), digest_size=HASH_BYTES, person=b"millstream-root").hexdigest()


def block_hash(parent: str, tokens: Sequence[int], contents: Contents = ()) -> str:
    """The hash of a block, whole or not. Positions in `contents` count from its first token."""
    # Each part carries its length, so that no two blocks have the same bytes.
    data = bytes.fromhex(parent) + struct.pack(f"<I{len(tokens)}i", len(tokens), *tokens)
    state = hashlib.blake2b(data, digest_size=HASH_BYTES, person=b"millstream-block")
    for position, name in sorted(contents):
        named = name.encode()
        state.update(struct.pack("<II", position, len(named)) + named)
    return state.hexdigest()


class BlockHashes:
    """The hashes of one request's blocks, each computed once: every checkpoint of a prompt asks for the same prefix
    again, and it only grows."""

    def __init__(self, root: str, contents: Contents, block: int) -> None:
        self._block = block
        self._contents = contents
        self._keys = [root]

    def keys(self, tokens: Sequence[int]) -> list[str]:
        """The root's hash and those of all whole blocks of `tokens`, which extend what was asked for before or are a
        prefix of it."""
        whole = len(tokens) // self._block
        known = len(self._keys) - 1
        if known < whole:
            start, end = known * self._block, whole * self._block
            later = [(position - start, name) for position, name in self._contents if start <= position < end]
            self._keys += block_hashes(self._keys[-1], tokens[start:end], later, self._block)
        return self._keys[: whole + 1]


def block_hashes(parent: str, tokens: Sequence[int], contents: Contents, block: int) -> tuple[str, ...]:
    """The hashes of all blocks of `tokens`; the last block may be shorter."""
    keys: list[str] = []
    for start in range(0, len(tokens), block):
        inside = contents and [
            (position - start, name) for position, name in contents if start <= position < start + block
        ]
        parent = block_hash(parent, tokens[start : start + block], inside)
        keys.append(parent)
    return tuple(keys)
