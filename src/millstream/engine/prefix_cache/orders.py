"""What the prefix cache asks of a backend: save, restore and export KV blocks and checkpoints. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.types import Tensor


@dataclass(frozen=True, slots=True)
class SavePrefix:
    """Save a row's first `tokens` for later requests: block number `first` under the first handle, and so on. Earlier
    blocks are saved already. Models that resume from checkpoints also save the state after `tokens`."""

    request_id: int
    first: int
    block: int
    handles: tuple[int, ...]
    checkpoint: int | None = None
    """The handle for the state after `tokens`."""
    tokens: int = 0
    export_id: int | None = None
    """The id under which to export the blocks for the disk tier."""
    checkpoint_export_id: int | None = None

    @property
    def all_handles(self) -> tuple[int, ...]:
        return self.handles if self.checkpoint is None else (*self.handles, self.checkpoint)


@dataclass(frozen=True, slots=True)
class SharePrefix:
    """A row that joins the batch reads its first tokens where these blocks are, instead of holding a copy. They are not
    evicted until it has left."""

    request_id: int
    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExportedPrefix:
    """Saved blocks or a checkpoint as plain data, under the id that was asked for."""

    export_id: int
    tensors: tuple[tuple[str, Tensor], ...]
    extra: str = ""


@dataclass(frozen=True, slots=True)
class RestorePrefix:
    """Bring exported data back under new handles: blocks number `first` and on of those in `tensors`, or a
    checkpoint."""

    tensors: tuple[tuple[str, Tensor], ...]
    extra: str = ""
    first: int = 0
    block: int = 0
    handles: tuple[int, ...] = ()
    checkpoint: int | None = None
