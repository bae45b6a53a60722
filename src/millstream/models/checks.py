"""Every check that a model's files must pass before a library sees them. No weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from millstream.errors import ModelError
from millstream.models.config_check import Room, check_config
from millstream.models.files import LIMITS, check_file, read_object
from millstream.models.safetensors_header import loaded_tensors
from millstream.models.trust import check_trust

_PARSED = frozenset({
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "processor_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "hf_quant_config.json", "chat_template.json",
})  # fmt: skip
"""Besides config.json: what we or a library read as JSON objects."""
_MOST_FILES = 10_000


def check_model(kind: Literal["folder", "gguf"], path: Path) -> None:
    """Raises `ModelError` with a reason for files that must not or cannot be loaded."""
    if kind == "gguf":
        _check_gguf(path)
    else:
        check_folder(path)


def check_folder(folder: Path) -> dict[str, Any]:
    """The folder's configuration, once everything in the folder is found fit to be read."""
    config = read_object(folder / "config.json")
    check_trust(folder, config)
    _check_files(folder)
    check_config(folder / "config.json", config, Room.of(loaded_tensors(folder).values()))
    return config


def _check_files(folder: Path) -> None:
    """Libraries open these by their names: each must be a regular file of a bearable size, and JSON if it says so."""
    for number, path in enumerate(folder.iterdir()):
        if number > _MOST_FILES:
            raise ModelError(f"{folder}: has more than {_MOST_FILES} files")
        if path.name in _PARSED:
            read_object(path)
        elif (path.name in LIMITS or path.suffix in LIMITS) and not path.is_dir():
            check_file(path)


def _check_gguf(path: Path) -> None:
    from millstream.models.gguf_check import check_gguf  # NumPy and the gguf package are slow to import
    from millstream.models.gguf_config import gguf_config
    from millstream.models.gguf_file import open_gguf

    file = open_gguf(path)
    check_gguf(file, gguf_config(file))
