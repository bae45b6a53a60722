"""Describes the models on this machine's disk by their headers, without loading them. No MLX."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from millstream.models.cached_models import CachedModel, cached_models
from millstream.models.description import BAD_FILES, Files, describe_files
from millstream.models.files import read_optional_object
from millstream.models.kind import kind_of
from millstream.models.source import ModelSource

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskModel:
    """A model on disk. A field is None if its files do not say it."""

    cached: CachedModel
    kind: str
    family: str | None = None
    parameters: int | None = None
    quantization: str | None = None
    context_length: int | None = None


def disk_models(cache_dir: Path | None) -> list[DiskModel]:
    return [_described(cached) for cached in cached_models(cache_dir)]


def _described(cached: CachedModel) -> DiskModel:
    kind, files = described(cached.source) if cached.is_complete else ("unknown", None)
    if files is None:
        return DiskModel(cached, kind)
    return DiskModel(cached, kind, files.family, files.parameters, files.quantization, files.context_length)


def described(source: ModelSource) -> tuple[str, Files | None]:
    """What the model is for, and what its headers say: None if they cannot be read."""
    try:
        if source.kind == "gguf":
            return "text", describe_files(source)
        config = read_optional_object(source.path / "config.json")
        kind = kind_of(config, {path.name for path in source.path.iterdir()})
        return kind, describe_files(source) if config and any(source.path.glob("*.safetensors")) else None
    except BAD_FILES as error:
        log.debug("%s cannot be described: %s", source.path, error)
        return "unknown", None
