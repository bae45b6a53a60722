"""Writes model folders whose tensors are all zero, with real headers and without MLX."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

SIZES = {"F32": 4, "BF16": 2, "U32": 4, "I32": 4, "F8_E4M3": 1}


def write_zeros(folder: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], **config: Any) -> Path:
    """`tensors`: type and shape by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
