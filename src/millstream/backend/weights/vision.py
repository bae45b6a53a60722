"""Loads vision-language models through mlx-vlm. Owner only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millstream.errors import ModelError
from millstream.models.checks import check_folder
from millstream.models.vision import FAMILIES


def load_vision(path: Path) -> tuple[Any, dict[str, Any]]:
    """The model with its towers, not evaluated, and its configuration with the fields that its family leaves out."""
    from mlx_vlm.utils import get_model_type, load_model

    # mlx-vlm runs the Python file that a configuration names, without asking.
    config = check_folder(path)
    if get_model_type(config) not in FAMILIES:
        raise ModelError(
            f"{path / 'config.json'}: mlx-vlm takes this for a {get_model_type(config)!r} model, which is not supported"
        )
    model = load_model(path, lazy=True)
    text = model.config.text_config
    config.setdefault("vocab_size", text.vocab_size)
    config.setdefault("max_position_embeddings", text.max_position_embeddings)
    return model, config
