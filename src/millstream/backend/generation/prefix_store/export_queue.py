"""Kept arrays on their way out as plain data: some bytes a step, so that rows keep their pace. Owner only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import mlx.core as mx

from millstream.backend.generation.prefix_store.tensors import to_tensor
from millstream.engine.prefix_cache.orders import ExportedPrefix
from millstream.types import Tensor

BYTES_PER_STEP = 16 << 20


@dataclass(slots=True)
class _Export:
    export_id: int
    extra: str
    arrays: Iterator[tuple[str, mx.array]]
    done: list[tuple[str, Tensor]] = field(default_factory=list)


class ExportQueue:
    def __init__(self) -> None:
        self._parcels: deque[_Export] = deque()

    def __bool__(self) -> bool:
        return bool(self._parcels)

    def add(self, export_id: int, named: list[tuple[str, mx.array]], extra: str = "") -> None:
        """The arrays are evaluated, and nobody writes to them."""
        self._parcels.append(_Export(export_id, extra, iter(named)))

    def advance(self) -> list[ExportedPrefix]:
        """Copy some; what is complete."""
        left = BYTES_PER_STEP
        complete: list[ExportedPrefix] = []
        while self._parcels and left > 0:
            parcel = self._parcels[0]
            item = next(parcel.arrays, None)
            if item is None:
                complete.append(ExportedPrefix(parcel.export_id, tuple(parcel.done), parcel.extra))
                self._parcels.popleft()
                continue
            parcel.done.append((item[0], to_tensor(item[1])))
            left -= item[1].nbytes
        return complete

    def clear(self) -> None:
        self._parcels.clear()
