"""Runs every check that a model's files must pass before a library opens them. Reads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from millstream.errors import ModelError
from millstream.models.config_check import StoredCounts, check_config
from millstream.models.files import LIMITS, check_file, read_object
from millstream.models.kokoro_config import torch_weights
from millstream.models.safetensors_header import loaded_tensors
from millstream.models.speech_layout import speech_tensors
from millstream.models.trust import check_trust

_JSON_OBJECTS = frozenset({
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "processor_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "hf_quant_config.json", "chat_template.json",
})  # fmt: skip
"""Besides config.json: files that we or a library parse as JSON objects."""
_MAX_FILES = 10_000


def check_model(kind: Literal["folder", "gguf"], path: Path) -> None:
    """Raises `ModelError` if the files cannot be loaded or must not be."""
    if kind == "gguf":
        _check_gguf(path)
    else:
        check_folder(path)


def check_folder(folder: Path) -> dict[str, Any]:
    """Checks everything in a model folder and returns its config.json."""
    config = read_object(folder / "config.json")
    check_trust(folder, config)
    _check_files(folder)
    tensors = loaded_tensors(folder) if torch_weights(folder) is None else speech_tensors(folder)
    check_config(folder / "config.json", config, StoredCounts.of(tensors.values()))
    return config


def _check_files(folder: Path) -> None:
    """Libraries open these files by name: each must be a regular file within its size limit, and valid JSON if it is
    named so."""
    for number, path in enumerate(folder.iterdir()):
        if number > _MAX_FILES:
            raise ModelError(f"{folder}: has more than {_MAX_FILES} files")
        if path.name in _JSON_OBJECTS:
            read_object(path)
        elif (path.name in LIMITS or path.suffix in LIMITS) and not path.is_dir():
            check_file(path)


def _check_gguf(path: Path) -> None:
    from millstream.models.gguf_check import check_gguf  # NumPy and the gguf package are slow to import
    from millstream.models.gguf_config import gguf_config
    from millstream.models.gguf_file import open_gguf

    file = open_gguf(path)
    check_gguf(file, gguf_config(file))
