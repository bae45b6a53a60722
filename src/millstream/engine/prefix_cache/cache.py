"""The prefix cache as the scheduler sees it, and the one that caches nothing.

The cache decides which prefixes are saved, matched and evicted. It holds no arrays: the backend keeps these under the
handles that the cache's orders name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from millstream.engine.prefix_cache.disk.tier import Fetched
from millstream.engine.prefix_cache.index import Hit
from millstream.engine.prefix_cache.orders import ExportedPrefix, RestorePrefix, SavePrefix, SharePrefix
from millstream.engine.prefix_cache.prompt import CachedPrompt


@dataclass(slots=True)
class CacheOrders:
    """What the next plan asks of the backend for the cache."""

    save: list[SavePrefix] = field(default_factory=list)
    evict: list[int] = field(default_factory=list)
    share: list[SharePrefix] = field(default_factory=list)


class PrefixCache(Protocol):
    """Owner only. `BlockPrefixCache` and `CheckpointPrefixCache` cache; `NullPrefixCache` does not."""

    @property
    def has_orders(self) -> bool:
        """True if a step is needed even if no request needs one."""
        ...

    def nbytes(self) -> tuple[int, int]:
        """Bytes in memory and on disk."""
        ...

    def fetch_soon(self, prompt: CachedPrompt) -> bool:
        """Start to read a longer prefix from disk, if there is one worth it; True if the request should wait for it."""
        ...

    def fetched(self) -> Iterable[Fetched]:
        """The disk reads that have completed."""
        ...

    def restore(self, prompt: CachedPrompt, fetched: Fetched) -> list[RestorePrefix]:
        """Orders that bring fetched data into memory, with the next plan. The request may start in the same plan."""
        ...

    def peek(self, prompt: CachedPrompt) -> int:
        """How many tokens of a prompt `match` would find now."""
        ...

    def match(self, prompt: CachedPrompt) -> Hit:
        """The longest cached prefix of a prompt that starts now. It is not evicted until `release`, or, if rows share
        prefixes, until the request has ended."""
        ...

    def release(self, prompt: CachedPrompt) -> None:
        """The first chunk has run, so the backend has restored the hit."""
        ...

    def save_chunk(self, prompt: CachedPrompt, end: int) -> SavePrefix | None:
        """What to save once a chunk of the prompt that ends at `end` has run, in the next plan."""
        ...

    def completed(self, prompt: CachedPrompt) -> bool:
        """The prompt is complete, and its row does not join the batch yet. True if the next step saves the prompt; if
        not, nothing is gained by waiting."""
        ...

    def joined(self, prompt: CachedPrompt) -> None:
        """The prompt is complete; its row joins the batch in the next step, which saves the prompt unless it is."""
        ...

    def ended(self, prompt: CachedPrompt, generated: Sequence[int], *, computed_last: bool = True) -> None:
        """A row has left the batch, or will in the next step. `generated`: the tokens that it gave; `computed_last`:
        its KV cache holds the last of them, and nothing more."""
        ...

    def abandoned(self, prompt: CachedPrompt, computed: int) -> None:
        """A request has ended in prefill, with so many tokens of its prompt computed. The next step drops them."""
        ...

    def orders(self) -> CacheOrders:
        """For the next plan, after `save_chunk` was called for its chunks."""
        ...

    def unsaved(self, handles: Sequence[int]) -> None:
        """The backend could not save or restore these."""
        ...

    def exported(self, exported: Iterable[ExportedPrefix]) -> None:
        """Data for the disk tier."""
        ...

    def clear(self) -> None:
        """Drop everything, in memory and on disk. Between two steps only."""
        ...

    def reset(self) -> None:
        """The backend has lost its arrays after a failed step."""
        ...

    def wake_by(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when there is something in `fetched`."""
        ...

    def close(self) -> None:
        """Complete writes to disk."""
        ...


class NullPrefixCache:
    """Caches nothing: for models whose state cannot be saved, or a budget of 0."""

    has_orders = False

    def nbytes(self) -> tuple[int, int]:
        return 0, 0

    def fetch_soon(self, prompt: CachedPrompt) -> bool:
        return False

    def fetched(self) -> Iterable[Fetched]:
        return ()

    def restore(self, prompt: CachedPrompt, fetched: Fetched) -> list[RestorePrefix]:
        return []

    def peek(self, prompt: CachedPrompt) -> int:
        return 0

    def match(self, prompt: CachedPrompt) -> Hit:
        return prompt.hit

    def release(self, prompt: CachedPrompt) -> None:
        """Nothing was matched."""

    def save_chunk(self, prompt: CachedPrompt, end: int) -> SavePrefix | None:
        return None

    def completed(self, prompt: CachedPrompt) -> bool:
        return False

    def joined(self, prompt: CachedPrompt) -> None:
        """Nothing is saved."""

    def ended(self, prompt: CachedPrompt, generated: Sequence[int], *, computed_last: bool = True) -> None:
        """Nothing is saved."""

    def abandoned(self, prompt: CachedPrompt, computed: int) -> None:
        """Nothing is saved."""

    def orders(self) -> CacheOrders:
        return CacheOrders()

    def unsaved(self, handles: Sequence[int]) -> None:
        """Nothing was saved."""

    def exported(self, exported: Iterable[ExportedPrefix]) -> None:
        """Nothing was saved."""

    def clear(self) -> None:
        """Nothing was saved."""

    def reset(self) -> None:
        """Nothing was saved."""

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Nothing is fetched."""

    def close(self) -> None:
        """Nothing is written."""
