"""The prefix cache of models whose state cannot be cut: sliding windows, recurrent states, hybrids.

They resume only from a checkpoint: the whole state after some number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.disk.tier import DiskMatch, Tier
from millstream.engine.prefix_cache.index import Hit, PrefixIndex
from millstream.engine.prefix_cache.orders import SavePrefix
from millstream.engine.prefix_cache.prompt import CachedPrompt

CHECKPOINT_EVERY = 1024
"""Tokens between checkpoints in a long prompt, so that one that changes late is not prefilled from its start."""


class CheckpointPrefixCache(BlockPrefixCache):
    """Saves checkpoints during prefill (at the last block border, where the prompt leaves a known prefix, and every
    `CHECKPOINT_EVERY` tokens) and at the end of a row. A request that ends in prefill leaves its checkpoints."""

    def __init__(self, index: PrefixIndex, checkpoint_bytes: Callable[[int], int], disk: Tier | None = None) -> None:
        """`checkpoint_bytes`: an upper bound for the size of a checkpoint after so many tokens."""
        if not index.from_checkpoints:
            raise ValueError("this index does not resume from checkpoints")
        super().__init__(index, disk)
        self._checkpoint_bytes = checkpoint_bytes

    def match(self, prompt: CachedPrompt) -> Hit:
        hit = super().match(prompt)
        block, start, end = self._index.block, hit.tokens, len(prompt.prefilled_tokens)
        if end // block - start // block >= self._index.least:
            spaced = range((start // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY, end, CHECKPOINT_EVERY)
            borders = {hit.shared, end // block * block, *(position // block * block for position in spaced)}
            prompt.checkpoints = tuple(sorted(position for position in borders if start < position <= end))
        return hit

    def completed(self, prompt: CachedPrompt) -> bool:
        """Its checkpoints were saved with its chunks."""
        return False

    def save_chunk(self, prompt: CachedPrompt, end: int) -> SavePrefix | None:
        if end not in prompt.checkpoints:
            return None
        return self._insert(prompt, prompt.tokens[:end], self._checkpoint_bytes(end))

    def _match_on_disk(self, prompt: CachedPrompt, tokens: tuple[int, ...], hit: Hit) -> DiskMatch | None:
        return self._disk.match_checkpoint(prompt, tokens, hit.shared // self._index.block, hit.tokens)

    def _checkpoint_bytes_of(self, match: DiskMatch) -> int | None:
        return self._checkpoint_bytes(match.tokens)

    def _save_rows(self) -> Iterable[SavePrefix | None]:
        for prompt, generated, computed_last in self._ended:
            tokens = (*prompt.tokens, *(generated if computed_last else generated[:-1]))
            new = len(tokens) - prompt.checkpoints[-1] if prompt.checkpoints else len(tokens)
            if new // self._index.block >= self._index.least - 1:
                yield self._insert(prompt, tokens, self._checkpoint_bytes(len(tokens)))
