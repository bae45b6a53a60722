"""Nothing from a model folder is executed or unpickled.

mlx-lm and mlx-vlm import the Python file that `model_file` names, and both make a module's name out of `model_type`;
transformers imports what `auto_map` names. The first is refused, the second must be a plain name, and the third, which
many published models carry, is never followed.
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
_SHARD = re.compile(r"[^/\\\0]+\.safetensors")
_OFFLOADED = "offload_index.json"
"""Has mlx-vlm leave weights in further files that it names."""

TOKENIZER_SETTINGS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_DATA = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "merges.txt")


def check_trust(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises `ModelError` for a folder that asks a library to run code or to read files from elsewhere."""
    path = folder / "config.json"
    for place, part in _objects(config):
        if part.get("model_file") is not None:
            raise ModelError(
                f"{path}: {place}model_file is {part['model_file']!r}: this model brings its own Python code, "
                "and code from a model folder is never run. Use a model of a family that mlx-lm or mlx-vlm has."
            )
        kind = part.get("model_type")
        if kind is not None and not (isinstance(kind, str) and _PLAIN_NAME.fullmatch(kind)):
            raise ModelError(f"{path}: {place}model_type is {kind!r:.80}; letters, digits, _ and - are allowed")
        if part.get("ple_storage") is not None:
            raise ModelError(f"{path}: {place}ple_storage is not served: it names files outside of the weights")
    if (folder / _OFFLOADED).exists():
        raise ModelError(f"{folder / _OFFLOADED}: offloaded experts are not served")


def check_shard_name(index: Path, name: object) -> str:
    """A file of weights beside its index. Any other name could lead out of the folder, or to another format."""
    if not isinstance(name, str) or not _SHARD.fullmatch(name):
        raise ModelError(f"{index}: names the file {name!r:.120}; a *.safetensors file beside the index is needed")
    return name


def copy_tokenizer_data(folder: Path, target: Path) -> None:
    """Give a library only data: links to vocabularies, and settings without anything that leads to code."""
    for name in TOKENIZER_SETTINGS:
        if (folder / name).exists():
            (target / name).write_text(json.dumps(_settings_only(read_object(folder / name))), encoding="utf-8")
    for pattern in TOKENIZER_DATA:
        for file in folder.glob(pattern):
            check_file(file)
            (target / file.name).symlink_to(file.resolve())


def _settings_only(value: Any) -> Any:
    if isinstance(value, list):
        return [_settings_only(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _settings_only(each) for key, each in value.items() if not _leads_out(key, each)}


def _leads_out(key: str, value: Any) -> bool:
    if key == "tokenizer_class":
        # transformers takes any of its classes here, also those that load weights
        return not (isinstance(value, str) and _TOKENIZER_CLASS.fullmatch(value))
    return key in ("auto_map", "custom_pipelines", "_name_or_path") or key.endswith("_file")


def _objects(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The configuration and all objects inside it, each with where it stands: `text_config.` and so on."""
    yield place, config
    for key, value in config.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield from _objects(each, f"{place}{key}.")
