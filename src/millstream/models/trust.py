"""Refuses model folders that would make a library execute code or open files elsewhere.

mlx-lm and mlx-vlm import the Python file that `model_file` names, and both build a module name from `model_type`;
transformers imports what `auto_map` names. `model_file` is refused, `model_type` must be a plain name, and `auto_map`,
which many published models have, is never followed. Nothing from a model folder is unpickled, but for
Kokoro's tensors, by a reader that can make nothing but tensors (`torch_file.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from millstream.errors import ModelError
from millstream.models.files import check_file, read_object

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*")
_TOKENIZER_CLASS = re.compile(r"(?!Auto)[A-Za-z0-9_]+Tokenizer(Fast)?")
_SHARD_NAME = re.compile(r"[^/\\\0]+\.safetensors")
_OFFLOAD_INDEX = "offload_index.json"
"""Makes mlx-vlm load weights from the further files that it names."""

TOKENIZER_SETTINGS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_DATA = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "merges.txt")


def check_trust(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises `ModelError` if config.json would make a library run code or open files elsewhere."""
    path = folder / "config.json"
    for prefix, section in _objects(config):
        if section.get("model_file") is not None:
            raise ModelError(
                f"{path}: {prefix}model_file is {section['model_file']!r}: this model needs its own Python code, "
                "and code from a model folder is never run. Use a model of a family that mlx-lm or mlx-vlm supports."
            )
        kind = section.get("model_type")
        if kind is not None and not (isinstance(kind, str) and _PLAIN_NAME.fullmatch(kind)):
            raise ModelError(f"{path}: {prefix}model_type is {kind!r:.80}; it may have letters, digits, _ and - only")
        if section.get("ple_storage") is not None:
            raise ModelError(f"{path}: {prefix}ple_storage is not supported: it names files besides the weights")
    if (folder / _OFFLOAD_INDEX).exists():
        raise ModelError(f"{folder / _OFFLOAD_INDEX}: offloaded experts are not supported")


def check_shard_name(index: Path, name: object) -> str:
    """Returns the name of a weight file in the index's folder. Raises `ModelError` for any other name: it could lead
    out of the folder or to another format."""
    if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
        raise ModelError(
            f"{index}: names the file {name!r:.120}; it must be a *.safetensors file in the same folder as the index"
        )
    return name


def copy_tokenizer_data(folder: Path, target: Path) -> None:
    """Fill `target` with files that a library may open: links to vocabularies, and settings without references."""
    for name in TOKENIZER_SETTINGS:
        if (folder / name).exists():
            (target / name).write_text(json.dumps(_without_references(read_object(folder / name))), encoding="utf-8")
    for pattern in TOKENIZER_DATA:
        for file in folder.glob(pattern):
            check_file(file)
            (target / file.name).symlink_to(file.resolve())


def _without_references(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_references(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_references(each) for key, each in value.items() if not _is_reference(key, each)}


def _is_reference(key: str, value: Any) -> bool:
    if key == "tokenizer_class":
        # transformers accepts any of its classes here, also those that load weights
        return not (isinstance(value, str) and _TOKENIZER_CLASS.fullmatch(value))
    return key in ("auto_map", "custom_pipelines", "_name_or_path") or key.endswith("_file")


def _objects(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The configuration and all objects inside it, each with the prefix of its keys: `text_config.` and so on."""
    yield prefix, config
    for key, value in config.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield from _objects(each, f"{prefix}{key}.")
