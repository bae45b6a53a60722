"""Models that see: which folders hold one, and loading them through mlx-vlm. Owner only."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from millstream.errors import ModelError

FAMILIES = frozenset({
    "gemma3",
    "gemma4",
    "idefics3",
    "llava",
    "mistral3",
    "pixtral",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
})  # fmt: skip
"""Whose images, positions and masks are understood here. Other models are served as text, where mlx-lm can."""

_TEXT_PARTS = {"llava": ("llama", "qwen2"), "mistral3": ("mistral", "ministral3")}
"""Families whose language model may be of several kinds, and those that are known here."""


def sees(path: Path) -> bool:
    """Whether a folder holds a model that takes images, of a family that is known here."""
    if not (path / "config.json").is_file():
        return False
    config = read_config(path)
    family, text = config.get("model_type"), config.get("text_config")
    if family not in FAMILIES or not isinstance(config.get("vision_config"), dict):
        return False
    part = text.get("model_type") if isinstance(text, dict) else None
    return family not in _TEXT_PARTS or part is None or part in _TEXT_PARTS[family]


def can_load() -> bool:
    """mlx-vlm comes with the extra `vision`."""
    return importlib.util.find_spec("mlx_vlm") is not None


def read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
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
