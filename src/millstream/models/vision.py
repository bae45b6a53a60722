"""Recognises vision-language models by their configuration. No MLX."""

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
"""Families whose images, positions and masks are supported. Other models are served as text models if mlx-lm can."""

_LANGUAGE_MODELS = {"llava": ("llama", "qwen2"), "mistral3": ("mistral", "ministral3")}
"""Families with several kinds of language model, and the supported kinds."""


def is_vision_model(config: Mapping[str, Any]) -> bool:
    """True if the model takes images and its family is supported."""
    family, text = config.get("model_type"), config.get("text_config")
    if family not in FAMILIES or not isinstance(config.get("vision_config"), dict):
        return False
    language = text.get("model_type") if isinstance(text, dict) else None
    return family not in _LANGUAGE_MODELS or language is None or language in _LANGUAGE_MODELS[family]


def has_mlx_vlm() -> bool:
    """True if mlx-vlm is installed; `installed.vision_command` says how to."""
    return importlib.util.find_spec("mlx_vlm") is not None
