"""Runs of blocks whose whole content follows from a seed, for the tests of the disk tier."""

from __future__ import annotations

import random

from millstream.engine.prefix_cache.block_hash import root_hash
from millstream.engine.prefix_cache.disk.block_file import StoredRun
from millstream.types import Tensor

STAMP = "test/1 model=abc kv=bfloat16 block=4"
BLOCK = 4


def seeded_run(seed: int, *, parent: str | None = None, size: int = 2000, tokens: int = 12) -> StoredRun:
    """`size`: about so many bytes of data. A run says its own seed, so that a test can make it again."""
    source = random.Random(seed)
    half = max(1, size // 4)
    return StoredRun(
        parent=root_hash(STAMP) if parent is None else parent,
        block=BLOCK,
        tokens=tuple(source.randrange(50_000) for _ in range(tokens)),
        contents=((tokens // 2, f"image-{seed}"),) if seed % 3 == 0 else (),
        tensors=(
            ("layers.0.keys", Tensor("bfloat16", (1, half), source.randbytes(2 * half))),
            ("layers.0.values", Tensor("float16", (half, 1), source.randbytes(2 * half))),
        ),
        extra=f'{{"seed": {seed}, "size": {size}, "tokens": {tokens}}}',
    )
