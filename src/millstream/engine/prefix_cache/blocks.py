"""The prefix cache of models with full attention: whole KV blocks, from any of which a prompt can continue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from millstream.engine.prefix_cache.cache import CacheOrders
from millstream.engine.prefix_cache.disk.block_file import StoredRun
from millstream.engine.prefix_cache.disk.index import Piece
from millstream.engine.prefix_cache.disk.tier import DiskMatch, Fetched, NullDiskTier, Tier
from millstream.engine.prefix_cache.index import Hit, Inserted, PrefixIndex
from millstream.engine.prefix_cache.orders import ExportedPrefix, RestorePrefix, SavePrefix, SharePrefix
from millstream.engine.prefix_cache.prompt import CachedPrompt


class BlockPrefixCache:
    """See `PrefixCache`. A prompt is saved when it is complete, in the step in which its row joins the batch or before,
    so that concurrent requests find it, and with its output when the row ends, so that the next turn of a conversation
    does. Of a request that ends in prefill, what was computed is saved."""

    def __init__(self, index: PrefixIndex, disk: Tier | None = None, *, share_tokens: int = 0) -> None:
        """`disk`: the tier for what does not stay in memory. `share_tokens`: rows with at least so many tokens in the
        cache read them there, instead of holding a copy; 0: none does."""
        self._index = index
        self._disk = disk or NullDiskTier()
        self._share_tokens = share_tokens
        self._joined: dict[int, CachedPrompt] = {}
        """Their rows join the batch in the next step."""
        self._completed: list[CachedPrompt] = []
        """Their rows do not join yet."""
        self._ended: list[tuple[CachedPrompt, Sequence[int], bool]] = []
        self._abandoned: list[tuple[CachedPrompt, int]] = []
        self._evict: list[int] = []

    @property
    def has_orders(self) -> bool:
        return bool(self._evict)

    def nbytes(self) -> tuple[int, int]:
        return self._index.nbytes, self._disk.nbytes

    def fetch_soon(self, prompt: CachedPrompt) -> bool:
        if (match := self.match_on_disk(prompt)) is None:
            return False
        self._disk.fetch_soon(prompt.request_id, match)
        return True

    def match_on_disk(self, prompt: CachedPrompt) -> DiskMatch | None:
        """A prefix on disk that is longer than the one in memory by enough to be worth reading."""
        if prompt.bypass:
            return None
        tokens = prompt.prefilled_tokens
        hit = self._index.match(tokens, prompt.contents)
        self._index.release(hit)
        match = self._match_on_disk(prompt, tokens, hit)
        worth = match is not None and match.tokens - hit.tokens >= self._index.least * self._index.block
        return match if worth else None

    def fetched(self) -> Iterable[Fetched]:
        return self._disk.fetched()

    def restore(self, prompt: CachedPrompt, fetched: Fetched) -> list[RestorePrefix]:
        if fetched.runs is None:
            return []
        match = fetched.match
        tokens = prompt.tokens[: match.tokens]
        inserted = self._index.insert(tokens, prompt.contents, self._checkpoint_bytes_of(match), least=1)
        self._evict += inserted.evicted
        fresh = range(inserted.first, inserted.first + len(inserted.handles))
        if fresh and (not match.blocks or fresh.start < match.blocks[0][0]):
            # The blocks before it were evicted from memory meanwhile.
            self._evict += self._index.remove(inserted.handles)
            return []
        orders = [
            order
            for (start, piece), run in zip(match.blocks, fetched.runs, strict=False)
            if (order := self._restore_blocks(start, piece, run, inserted)) is not None
        ]
        if inserted.checkpoint is not None:
            last = fetched.runs[-1]
            orders.append(RestorePrefix(last.tensors, last.extra, checkpoint=inserted.checkpoint))
        return orders

    def peek(self, prompt: CachedPrompt) -> int:
        if prompt.bypass or not len(self._index):
            return 0
        hit = self._index.match(prompt.prefilled_tokens, prompt.contents)
        self._index.release(hit)
        return hit.tokens

    def match(self, prompt: CachedPrompt) -> Hit:
        if not prompt.bypass:
            prompt.hit = prompt.held = self._index.match(prompt.prefilled_tokens, prompt.contents)
        return prompt.hit

    def release(self, prompt: CachedPrompt) -> None:
        if not self._share_tokens:
            self._let_go(prompt)

    def _let_go(self, prompt: CachedPrompt) -> None:
        if prompt.held is not None:
            self._index.release(prompt.held)
            prompt.held = None

    def save_chunk(self, prompt: CachedPrompt, end: int) -> SavePrefix | None:
        """A prompt is saved as a whole, when its row joins."""
        return None

    def completed(self, prompt: CachedPrompt) -> bool:
        new = len(prompt.tokens) - 1 - prompt.hit.tokens
        if prompt.partial or new < self._index.least * self._index.block:
            return False
        self._completed.append(prompt)
        prompt.completed = True
        return True

    def joined(self, prompt: CachedPrompt) -> None:
        self._joined[prompt.request_id] = prompt

    def ended(self, prompt: CachedPrompt, generated: Sequence[int], *, computed_last: bool = True) -> None:
        self._let_go(prompt)
        if self._joined.pop(prompt.request_id, None) is None:
            self._ended.append((prompt, generated, computed_last))
        else:
            self.abandoned(prompt, len(prompt.tokens) - 1)  # its row has never been in the batch

    def abandoned(self, prompt: CachedPrompt, computed: int) -> None:
        self._let_go(prompt)
        self._abandoned.append((prompt, computed))

    def orders(self) -> CacheOrders:
        save = [order for order in self._save_rows() if order is not None]
        share = [order for prompt in self._joined.values() if (order := self._share(prompt)) is not None]
        evict, self._evict = self._evict, []
        for waiting in (self._ended, self._abandoned, self._completed):
            waiting.clear()
        self._joined.clear()
        return CacheOrders(save, evict, share)

    def _share(self, prompt: CachedPrompt) -> SharePrefix | None:
        """What a row that joins reads in the cache: all that is there once this plan's saves are done, whichever
        request computed it."""
        if not self._share_tokens or prompt.bypass or prompt.partial:
            return None
        held = self._index.match(prompt.prefilled_tokens, prompt.contents)
        self._let_go(prompt)
        prompt.held = held
        return SharePrefix(prompt.request_id, held.handles) if held.tokens >= self._share_tokens else None

    def unsaved(self, handles: Sequence[int]) -> None:
        self._evict += self._index.remove(handles)
        self._disk.cancel_exports(handles)

    def exported(self, exported: Iterable[ExportedPrefix]) -> None:
        for each in exported:
            self._disk.write(each)

    def clear(self) -> None:
        """Between two steps no hit waits to be restored, so every block may go."""
        self._evict += self._index.clear()
        self._disk.clear()

    def reset(self) -> None:
        self._index.clear()
        self._evict.clear()
        self._joined.clear()
        for waiting in (self._ended, self._abandoned, self._completed):
            waiting.clear()
        self._disk.reset()

    def wake_by(self, wake: Callable[[], None]) -> None:
        self._disk.wake = wake

    def close(self) -> None:
        self._disk.close()

    def _restore_blocks(self, start: int, piece: Piece, run: StoredRun, inserted: Inserted) -> RestorePrefix | None:
        """The blocks of a file that are wanted; the file begins with number `start` of the prompt's."""
        first = max(start, inserted.first)
        last = min(start + piece.count, inserted.first + len(inserted.handles))
        handles = inserted.handles[first - inserted.first : last - inserted.first] if first < last else ()
        if not handles:
            return None
        return RestorePrefix(run.tensors, first=piece.first + first - start, block=self._index.block, handles=handles)

    def _checkpoint_bytes_of(self, match: DiskMatch) -> int | None:
        """The size of the checkpoint that was found, if any."""
        return None

    def _match_on_disk(self, prompt: CachedPrompt, tokens: tuple[int, ...], hit: Hit) -> DiskMatch | None:
        return self._disk.match_blocks(prompt, tokens, len(hit.handles))

    def _save_rows(self) -> Iterable[SavePrefix | None]:
        for prompt, generated, _ in self._ended:
            # The row may not have computed the last token that it gave.
            yield self._insert(prompt, (*prompt.tokens, *generated[:-1]))
        for prompt, computed in self._abandoned:
            yield self._insert(prompt, prompt.tokens[:computed])
        joined = (prompt for prompt in self._joined.values() if not prompt.completed)
        for prompt in (*self._completed, *joined):
            yield self._insert(prompt, prompt.prefilled_tokens)

    def _insert(
        self, prompt: CachedPrompt, tokens: tuple[int, ...], checkpoint_bytes: int | None = None
    ) -> SavePrefix | None:
        if prompt.partial:
            return None
        inserted = self._index.insert(tokens, prompt.contents, checkpoint_bytes)
        self._evict += inserted.evicted
        if not inserted.handles and inserted.checkpoint is None:
            return None
        order = SavePrefix(
            prompt.request_id, inserted.first, self._index.block, inserted.handles, inserted.checkpoint, len(tokens)
        )
        return self._disk.with_exports(order, prompt, tokens)
