"""Single tensors of a model's folder, for what mlx-lm does not load. Owner only."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import mlx.core as mx

from millstream.models.safetensors_header import loaded_tensors


def stored_shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The type and the shape of each tensor. Raises `ModelError` for a file that must not be opened."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in loaded_tensors(folder).items()}


def read_tensors(folder: Path, names: Collection[str]) -> dict[str, mx.array]:
    """Some tensors, not evaluated. Call `stored_shapes` first: it checks the files."""
    found: dict[str, mx.array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if len(found) < len(names):
            loaded = mx.load(str(path))
            assert isinstance(loaded, dict)
            found |= {name: value for name, value in loaded.items() if name in names}
    return found
