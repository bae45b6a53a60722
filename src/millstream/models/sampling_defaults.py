"""The sampling that a model's authors recommend: its generation_config.json, or the metadata of its GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from millstream.models.description import BAD_FILES
from millstream.models.files import read_optional_object
from millstream.models.gguf_file import open_gguf
from millstream.models.source import ModelSource
from millstream.parameters import BY_NAME

log = logging.getLogger(__name__)

FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
_GGUF_PREFIX = "general.sampling."


def sampling_defaults(source: ModelSource) -> tuple[tuple[str, float], ...]:
    """As pairs of name and value. A value that cannot be is left out, with a line in the log: advice must not keep a
    model from being served."""
    try:
        found = _from_gguf(source) if source.kind == "gguf" else _from_folder(source)
    except BAD_FILES as error:
        log.warning("%s: its sampling defaults cannot be read: %s", source.name, error)
        return ()
    kept = []
    for name, value in found.items():
        row = BY_NAME[name]
        if row.kind == "integer" and isinstance(value, float) and value.is_integer():
            value = int(value)
        if row.accepts(value):
            kept.append((name, value))
        elif value is not None:
            told = f"{name} is {value!r:.60}, but must be a number from {row.low} to {row.high}"
            log.warning("%s: a sampling default of its files is not used: %s", source.name, told)
    return tuple(kept)


def _from_folder(source: ModelSource) -> dict[str, Any]:
    config = read_optional_object(source.path / FILE)
    values = {name: config.get(name) for name in _NAMES}
    return values | {"temperature": 0.0} if config.get("do_sample") is False else values


def _from_gguf(source: ModelSource) -> dict[str, Any]:
    metadata: Mapping[str, Any] = open_gguf(source.path).metadata
    named = {name: name for name in _NAMES} | {name: key for key, name in _GGUF.items()}
    return {name: metadata.get(_GGUF_PREFIX + key) for name, key in named.items()}
