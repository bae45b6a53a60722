"""All that can be told of a model without loading it: for `millstream show`. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream.config import Settings
from millstream.errors import ModelError
from millstream.loading.memory import footprint
from millstream.models.card import licence_of
from millstream.models.description import BAD_FILES, Files
from millstream.models.disk_models import described
from millstream.models.estimate import DeviceKind, Estimate, estimate, expected_device
from millstream.models.files import read_optional_object
from millstream.models.gguf_file import open_gguf
from millstream.models.machine import memory_bytes
from millstream.models.sampling_defaults import sampling_defaults
from millstream.models.source import ModelSource
from millstream.models.speech_layout import speech_family
from millstream.service.generation.model import capabilities
from millstream.text.chat_format import AUTO, ChatFormat, detect_chat_format
from millstream.text.loading import load_tokenizer


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a model needs on this machine, in bytes."""

    device: DeviceKind
    weights: int
    kv_per_token: int
    minimum: int
    wanted: int
    """With KV cache for a usual context."""
    available: int | None
    """What the device has in all. None if that is not known."""


@dataclass(frozen=True, slots=True)
class Inspection:
    source: ModelSource
    kind: str
    files: Files | None
    chat_format: ChatFormat
    licence: str | None
    memory: MemoryNeed | None
    sampling: tuple[tuple[str, float], ...] = ()
    """The defaults that its files recommend."""
    notes: tuple[str, ...] = ()
    """What could not be read, and why."""

    @property
    def capabilities(self) -> tuple[str, ...]:
        sees_images = self.files is not None and self.files.sees_images
        if _speaks(self.source):
            return ("speech",)
        return capabilities(self.chat_format, ["image"] if sees_images else []) if self.generates else ()

    @property
    def generates(self) -> bool:
        return self.kind in ("text", "vision")


def inspect(source: ModelSource) -> Inspection:
    """Reads headers, tokenizer, template and card. What is damaged is left out, with a note."""
    kind, files = described(source)
    notes: list[str] = [] if files else ["its weights or its configuration cannot be read"]
    chat_format = ChatFormat()
    if _speaks(source):  # it has no tokenizer and no KV cache
        return Inspection(source, kind, files, chat_format, _licence(source), None, notes=tuple(notes))
    try:
        tokenizer = load_tokenizer(source)
        template = tokenizer.template.source if tokenizer.template else None
        chat_format = detect_chat_format(
            template, lambda token: tokenizer.token_id(token) is not None, tools=AUTO, reasoning=AUTO
        )
    except BAD_FILES as error:
        notes.append(_text(error))
    memory = None
    try:
        memory = memory_need(source)
    except BAD_FILES as error:
        notes.append(_text(error))
    return Inspection(
        source, kind, files, chat_format, _licence(source), memory, sampling_defaults(source), tuple(notes)
    )


def memory_need(source: ModelSource) -> MemoryNeed:
    """With the default settings."""
    settings = Settings()
    device = expected_device(None)
    found: Estimate = estimate(source, device=device, unpack=settings.unpack)
    minimum, wanted = footprint(found, rows=settings.max_batch, kv_memory=None)
    return MemoryNeed(device, found.weight_bytes, found.kv_bytes_per_token, minimum, wanted, memory_bytes(device))


def _speaks(source: ModelSource) -> bool:
    return source.kind == "folder" and speech_family(read_optional_object(source.path / "config.json")) is not None


def _licence(source: ModelSource) -> str | None:
    if source.kind == "folder":
        return licence_of(source.path)
    try:
        found = open_gguf(source.path).metadata.get("general.license")
    except BAD_FILES:
        found = None
    return found if isinstance(found, str) else licence_of(Path(source.path).parent)


def _text(error: Exception) -> str:
    return error.message if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
