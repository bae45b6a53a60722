"""Loading models that see, through mlx-vlm. Owner only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millstream.errors import ModelError


def read_config(path: Path) -> dict[str, Any]:
    """A folder's configuration; empty if there is none."""
    file = path / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file}: not a JSON object")
    return config


def load_vision(path: Path) -> tuple[Any, dict[str, Any]]:
    """The whole model, lazily, and its configuration with what its family leaves out."""
    from mlx_vlm.utils import load_model

    config = read_config(path)
    model = load_model(path, lazy=True)
    text = model.config.text_config
    config.setdefault("vocab_size", text.vocab_size)
    config.setdefault("max_position_embeddings", text.max_position_embeddings)
    return model, config
