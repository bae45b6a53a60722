"""A request's prompt as the prefix cache sees it."""

from __future__ import annotations

from millstream.engine.prefix_cache.block_hash import BlockHashes
from millstream.engine.prefix_cache.index import Hit


class CachedPrompt:
    """What the cache knows of one request, from its arrival to its end."""

    __slots__ = (
        "bypass",
        "checkpoints",
        "completed",
        "contents",
        "expected",
        "hashes",
        "held",
        "hit",
        "partial",
        "request_id",
        "tokens",
    )

    def __init__(
        self,
        request_id: int,
        tokens: tuple[int, ...],
        contents: tuple[tuple[int, str], ...] = (),
        *,
        bypass: bool = False,
    ) -> None:
        """`contents`: media in the prompt, (position, hash). `bypass`: compute the whole prompt, whatever is cached."""
        self.request_id = request_id
        self.tokens = tokens
        self.contents = contents
        self.bypass = bypass
        self.partial = False
        """True if its row does not hold all of its tokens: then nothing of it is saved, and its row shares nothing."""
        self.completed = False
        """True if it was saved before its row joins."""
        self.hit = Hit()
        """The cached prefix that it started with."""
        self.held: Hit | None = None
        """What must not be evicted for it."""
        self.expected: int | None = None
        """Tokens that were cached when the request waited, if that was looked up."""
        self.checkpoints: tuple[int, ...] = ()
        """Positions where a chunk must end because a checkpoint is saved there."""
        self.hashes: BlockHashes | None = None
        """The hashes of its blocks, as far as they were needed."""

    @property
    def prefilled_tokens(self) -> tuple[int, ...]:
        """All but the last: that one is the first input of the decode step, so it is always computed."""
        return self.tokens[:-1]
