"""What a transcription model is and needs, by its files alone. No MLX."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.model_facts import ModelDescription
from millstream.models.description import describe_files
from millstream.models.estimate import DeviceKind, quantized_values
from millstream.models.files import read_object
from millstream.models.safetensors_header import FLOATS, StoredTensor
from millstream.models.source import ModelSource
from millstream.models.transcription_layout import family_of, read_whisper
from millstream.models.transcription_rows import row_values
from millstream.models.whisper_files import ARCHIVE, weight_files, whisper_tensors

WORKSPACE = 256 * 2**20
"""Bytes that encoding windows takes beside the weights."""
MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class TranscriptionMemory:
    """In bytes."""

    weights: int
    row: int
    """Of one window that runs."""
    rows: int = MAX_ROWS
    """Windows that run at the same time, at most."""

    def for_rows(self, rows: int) -> int:
        return self.weights + WORKSPACE + rows * self.row

    def rows_in(self, granted: int) -> int:
        return max(1, min(self.rows, (granted - self.weights - WORKSPACE) // max(self.row, 1)))


@dataclass(frozen=True, slots=True)
class Described:
    description: ModelDescription
    translates: bool = False
    word_times: bool = False


def estimate_transcription(source: ModelSource, device: DeviceKind) -> TranscriptionMemory:
    """Raises `ModelError` if a file cannot be read."""
    tensors = whisper_tensors(source.path)
    values = _values(source, tensors)
    size = 4 if device == "cpu" else _float_size(tensors)
    family = family_of(source.path)
    if family == "whisper":
        row = size * read_whisper(source.path).row_values
    else:
        row = size * row_values(family, read_object(source.path / "config.json"))
    return TranscriptionMemory(size * sum(values.values()), row)


def describe_transcription(source: ModelSource) -> Described:
    """Raises what damaged files can raise."""
    family = family_of(source.path)
    if family != "whisper":
        files = describe_files(source)
        return Described(
            ModelDescription(
                format=files.format,
                family=family,
                parameters=files.parameters,
                quantization=files.quantization,
                file_bytes=files.file_bytes,
            ),
            word_times=family == "parakeet",
        )
    shape = read_whisper(source.path)
    tensors = whisper_tensors(source.path)
    settings = read_object(source.path / "config.json").get("quantization")
    bits = settings.get("bits") if isinstance(settings, dict) else None
    (first, *_) = weight_files(source.path)
    description = ModelDescription(
        format="npz" if first.name == ARCHIVE else "safetensors",
        family="whisper",
        parameters=sum(_values(source, tensors).values()),
        quantization=f"{bits}-bit" if bits else {4: "F32", 2: "F16"}.get(_float_size(tensors)),
        file_bytes=sum(tensor.nbytes for tensor in tensors.values()),
    )
    return Described(description, translates=shape.multilingual, word_times=True)


def _values(source: ModelSource, tensors: dict[str, StoredTensor]) -> dict[str, int]:
    quantized = quantized_values(tensors, read_object(source.path / "config.json"))
    return {name: quantized.get(name, tensor.values) for name, tensor in tensors.items()}


def _float_size(tensors: dict[str, StoredTensor]) -> int:
    """Bytes per value of the type that most weights have."""
    counts: dict[int, int] = {}
    for tensor in tensors.values():
        if tensor.dtype in FLOATS:
            size = FLOATS[tensor.dtype]
            counts[size] = counts.get(size, 0) + tensor.values
    return max(counts, key=lambda size: counts[size]) if counts else 2
