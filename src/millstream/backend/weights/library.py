"""Loads models of mlx-audio: its modules with our loading. Owner only.

mlx-audio's own loader guesses the family from the folder's name, ignores missing weights, prints, and lets transformers
run code from the folder. Here the family is known, each weight must be there, and only the modules are the library's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from millstream.backend.device import Device
from millstream.backend.weights.loading import UNPACKED, dtype_of, unpack_weights
from millstream.backend.weights.materialize import evaluate_all
from millstream.engine.protocols import Progress, ignore_progress
from millstream.errors import ModelError
from millstream.models.safetensors_header import folder_tensors, weight_files


class LibraryModel:
    """A model of mlx-audio with its weights, all of them evaluated on this thread."""

    def __init__(self, model: Any, device: Device, report: Progress = ignore_progress) -> None:
        dtype = UNPACKED.get(device.kind)
        self.notes = tuple(unpack_weights(model, device, dtype)) if dtype is not None else ()
        model.eval()
        self.weight_bytes = evaluate_all(model, report)
        self.dtype = dtype_of(model)


def stored_weights(folder: Path) -> dict[str, mx.array]:
    """All tensors of a folder's safetensors files, not read yet."""
    folder_tensors(folder)  # raises for a file that must not be opened
    tensors: dict[str, mx.array] = {}
    for path in weight_files(folder):
        loaded = mx.load(str(path))
        assert isinstance(loaded, dict)
        tensors |= loaded
    return tensors


def fill(model: Any, weights: dict[str, mx.array], config: dict[str, Any], where: Path) -> None:
    """Puts weights into a model. Raises `ModelError` if one is missing or has another shape; what the model does not
    have is ignored: training leaves counters and unused heads in the files."""
    _quantize(model, weights, config)
    wanted = dict(tree_flatten(model.parameters()))
    missing = sorted(wanted.keys() - weights.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{where}: its files lack the weights {missing[0]!r}{more}")
    for name, array in wanted.items():
        if array.shape != weights[name].shape:
            raise ModelError(f"{where}: {name!r} has the shape {weights[name].shape}; it must be {array.shape}")
    model.load_weights([(name, weights[name]) for name in wanted])


def _quantize(model: Any, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    settings = config.get("quantization") or config.get("quantization_config")
    if not isinstance(settings, dict) or "bits" not in settings:
        return

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        own = settings.get(path)
        return own if isinstance(own, dict) else True

    nn.quantize(
        model,
        group_size=settings.get("group_size", 64),
        bits=settings["bits"],
        mode=settings.get("mode", "affine"),
        class_predicate=predicate,
    )
