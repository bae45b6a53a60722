"""Describes a model by its files: family, number of weights, quantisation. Reads headers only; no MLX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from millstream.errors import ModelError
from millstream.models.estimate import quantized_values
from millstream.models.files import read_object
from millstream.models.geometry import context_length
from millstream.models.gguf_file import GgufFile, open_gguf
from millstream.models.safetensors_header import FLOATS, StoredTensor, folder_tensors
from millstream.models.source import ModelSource
from millstream.models.vision import has_mlx_vlm, is_vision_model

_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 30: "IQ4_XS", 32: "BF16",
}  # fmt: skip
"""The names of `general.file_type` in GGUF: how most tensors of a file are quantised."""


BAD_FILES = (ModelError, OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
"""What damaged files can raise. A description is for people: it must not keep a model from being served."""


@dataclass(frozen=True, slots=True)
class Files:
    """What the weights and the configuration of a model say."""

    format: str
    family: str | None
    parameters: int
    quantization: str | None
    context_length: int | None
    file_bytes: int
    sees_images: bool = False


def describe_files(source: ModelSource) -> Files:
    """Raises `ModelError` if a file cannot be read."""
    return _gguf(open_gguf(source.path)) if source.kind == "gguf" else _folder(source)


def _gguf(file: GgufFile) -> Files:
    parameters = sum(prod(tensor.shape) for tensor in file.tensors.values())
    length = file.hyper("context_length")
    quantization = _FILE_TYPES.get(_number(file.metadata.get("general.file_type"), -1))
    if quantization is None:
        sizes = {name: prod(tensor.shape) for name, tensor in file.tensors.items()}
        quantization = _most_common({name: tensor.kind for name, tensor in file.tensors.items()}, sizes)
    return Files(
        "gguf",
        file.architecture or None,
        parameters,
        quantization,
        _number(length, 0) or None,
        file.path.stat().st_size,
    )


def _folder(source: ModelSource) -> Files:
    config = read_object(source.path / "config.json")
    tensors = folder_tensors(source.path)
    settings = config.get("quantization") or config.get("quantization_config")
    quantized = quantized_values(tensors, config) if isinstance(settings, dict) else {}
    values = {name: quantized.get(name, tensor.values) for name, tensor in tensors.items()}
    family = config.get("model_type")
    return Files(
        "safetensors",
        family if isinstance(family, str) else None,
        sum(values.values()),
        _folder_quantization(settings, tensors, values),
        context_length(config),
        sum(tensor.nbytes for tensor in tensors.values()),
        is_vision_model(config) and has_mlx_vlm(),
    )


def _folder_quantization(
    settings: object, tensors: Mapping[str, StoredTensor], values: Mapping[str, int]
) -> str | None:
    """`4-bit`, or the dtype of most weights if they are not quantised."""
    bits = settings.get("bits") if isinstance(settings, dict) else None
    if isinstance(bits, int):
        return f"{bits}-bit"
    return _most_common({name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype in FLOATS}, values)


def _most_common(kinds: Mapping[str, str], sizes: Mapping[str, int]) -> str | None:
    totals: Counter[str] = Counter()
    for name, kind in kinds.items():
        totals[kind] += sizes[name]
    return totals.most_common(1)[0][0] if totals else None


def _number(value: Any, default: int) -> int:
    """A whole number of the metadata, which is untrusted."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default
