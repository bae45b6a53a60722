"""Which models take images, told by their configuration. No MLX."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

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
"""Whose images, positions and masks are understood. Other models are served as text, where mlx-lm can."""

_LANGUAGES = {"llava": ("llama", "qwen2"), "mistral3": ("mistral", "ministral3")}
"""Families whose language model may be of several kinds, and those that are understood."""


def sees(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of a model that takes images, of a family that is understood."""
    family, text = config.get("model_type"), config.get("text_config")
    if family not in FAMILIES or not isinstance(config.get("vision_config"), dict):
        return False
    language = text.get("model_type") if isinstance(text, dict) else None
    return family not in _LANGUAGES or language is None or language in _LANGUAGES[family]


def can_load() -> bool:
    """mlx-vlm comes with the extra `vision`."""
    return importlib.util.find_spec("mlx_vlm") is not None
