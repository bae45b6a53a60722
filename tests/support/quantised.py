"""Tiny models with quantised weights, saved as mlx-lm saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from support.tiny import write_model


def write_quantised(
    folder: Path,
    family: str,
    *,
    bits: int = 4,
    group_size: int = 32,
    mode: str = "affine",
    dtype: mx.Dtype = mx.float32,
    **changes: Any,
) -> Path:
    """A model of `family` whose weights are packed, with scales of this type."""
    write_model(folder, family, **changes)
    model, config = load_model(folder)
    model.set_dtype(dtype)
    nn.quantize(model, group_size, bits, mode=mode)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    packing = {"group_size": group_size, "bits": bits, "mode": mode}
    (folder / "config.json").write_text(json.dumps({**config, "quantization": packing}))
    return folder
