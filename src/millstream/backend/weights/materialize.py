"""Every array that an object reaches, private ones too."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from millstream.engine.protocols import Progress, ignore_progress


def reachable_arrays(root: object) -> Iterator[mx.array]:
    """Walk containers and attributes. `parameters()` skips names with an underscore, such as scaled-RoPE tables;
    left lazy, they would be evaluated by whichever thread runs first."""
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
    """The attributes of plain instances. Modules, classes and functions lead out of the model."""
    if isinstance(item, type) or type(item).__module__ == "builtins":
        return []
    return list(getattr(item, "__dict__", {}).values())


PORTION = 256 * 2**20


def evaluate_all(root: object, report: Progress = ignore_progress) -> int:
    """Evaluate everything `root` reaches on this thread's stream; returns the bytes. Portions keep what is being
    unpacked small, and let a waiting user see how far it is."""
    arrays = list(reachable_arrays(root))
    total = sum(array.nbytes for array in arrays)
    done = seen = 0
    portion: list[mx.array] = []
    for array in arrays:
        portion.append(array)
        seen += array.nbytes
        if seen >= done + PORTION:
            mx.eval(portion)
            done, portion = seen, []
            report(done / total)
    mx.eval(portion)
    report(1.0)
    return total
