"""Exports saved arrays as plain data, a bounded number of bytes per step, so that decoding rows keep their pace.

Owner only.
"""

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
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)


class ExportQueue:
    """Exports in progress, first in, first out."""

    def __init__(self) -> None:
        self._exports: deque[_Export] = deque()

    def __bool__(self) -> bool:
        return bool(self._exports)

    def add(self, export_id: int, named_arrays: list[tuple[str, mx.array]], extra: str = "") -> None:
        """Queue arrays that are evaluated by the next `advance` and never written to."""
        self._exports.append(_Export(export_id, extra, iter(named_arrays)))

    def advance(self) -> list[ExportedPrefix]:
        """Copy about `BYTES_PER_STEP` and return the exports that are complete."""
        budget = BYTES_PER_STEP
        complete: list[ExportedPrefix] = []
        while self._exports and budget > 0:
            export = self._exports[0]
            item = next(export.arrays, None)
            if item is None:
                complete.append(ExportedPrefix(export.export_id, tuple(export.tensors), export.extra))
                self._exports.popleft()
                continue
            export.tensors.append((item[0], to_tensor(item[1])))
            budget -= item[1].nbytes
        return complete

    def clear(self) -> None:
        self._exports.clear()
