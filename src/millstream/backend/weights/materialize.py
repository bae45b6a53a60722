"""Evaluates every array of a model, private ones too, and tells the progress of a load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from millstream.engine.protocols import Progress, ignore_progress


def reachable_arrays(root: object) -> Iterator[mx.array]:
    """All arrays in containers and attributes. `parameters()` skips names with an underscore, such as scaled-RoPE
    tables; left lazy, they would be evaluated on whichever thread runs first."""
    seen: set[int] = set()
    stack: list[object] = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, mx.array):
            yield item
            continue
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
        stack.extend(_attributes(item))


def _attributes(item: object) -> list[object]:
    """The attributes of plain instances. Modules, classes and functions would lead out of the model."""
    if isinstance(item, type) or type(item).__module__ == "builtins":
        return []
    return list(getattr(item, "__dict__", {}).values())


def embedding_rows(model: Any) -> int:
    """The rows of a language model's embedding table; 0 if it has none. Positions and the like have smaller ones."""
    modules = (module for _, module in model.named_modules())
    tables = (module for module in modules if isinstance(module, nn.Embedding | nn.QuantizedEmbedding))
    return max((table["weight"].shape[0] for table in tables), default=0)


PORTION = 64 * 2**20
"""The most bytes that are evaluated in one go; progress is reported after each portion."""
PORTIONS = 50
"""The least number of portions, so that the progress of small models moves too."""


class ByteProgress:
    """Reports which share of the bytes is in memory: at most once per portion, and at the end."""

    def __init__(self, total: int, report: Progress) -> None:
        self._total = total
        self._report = report
        self._done = self._reported = 0
        self.portion = min(PORTION, total // PORTIONS)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._reported + self.portion <= self._done < self._total:
            self._reported = self._done
            self._report(self._done / self._total)

    def finish(self) -> None:
        self._report(1.0)


def evaluate_all(root: object, report: Progress = ignore_progress) -> int:
    """Evaluate everything that `root` reaches on this thread's stream. Returns the bytes.

    Portions bound the memory for unpacking, and let `report` follow the bytes.
    """
    arrays = list(reachable_arrays(root))
    total = sum(array.nbytes for array in arrays)
    progress = ByteProgress(total, report)
    portion: list[mx.array] = []
    waiting = 0
    for array in arrays:
        portion.append(array)
        waiting += array.nbytes
        if waiting >= progress.portion:
            mx.eval(portion)
            progress.add(waiting)
            portion, waiting = [], 0
    mx.eval(portion)
    progress.finish()
    return total
