"""What a model will take of the memory, told before it is loaded and without MLX."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from math import prod
from typing import Any, Literal

from millstream.errors import ModelError
from millstream.models.files import read_object
from millstream.models.geometry import context_length, kv_group_size, kv_values_per_token, text_part
from millstream.models.gguf_blocks import BITS, GROUP
from millstream.models.gguf_config import gguf_config
from millstream.models.gguf_file import GgufTensor, open_gguf
from millstream.models.gguf_names import ROPE_TENSORS
from millstream.models.safetensors_header import FLOATS, StoredTensor, folder_tensors
from millstream.models.source import ModelSource
from millstream.models.vision import can_load, sees

DeviceKind = Literal["cpu", "cuda", "metal"]
Tensors = Mapping[str, StoredTensor]

_UNPACKED_SIZE = {"cpu": 4, "cuda": 2}
"""Bytes of a number in the form that the loader unpacks weights to. Metal computes on packed ones."""
_NOT_TEXT = frozenset(
    {"vision_tower", "vision_model", "vision_embedder", "visual", "audio_tower", "multi_modal_projector"}
    | {"embed_vision", "embed_audio", "mtp"}
)
"""Parts of a model that mlx-lm leaves in the file."""
_EXPERTS = re.compile(r"\b(experts|switch_mlp)\.(?!.*(scales|biases)$)")
_KEYS_OR_VALUES = re.compile(r"\blayers\.(\d+)\..*\b([kv])_proj\.weight$")
_WRONG = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
"""What reading a damaged configuration raises."""
_PACKED_BY_OTHERS = (".qweight", ".weight_packed", "_blocks")


@dataclass(frozen=True, slots=True)
class Estimate:
    weight_bytes: int
    """In memory, once loaded."""
    kv_bytes_per_token: int
    """Keys and values of one token in all layers; 0 for a model that keeps none."""
    context_length: int | None


def estimate(source: ModelSource, *, device: DeviceKind, unpack: bool, kv_bits: int = 0) -> Estimate:
    """Reads headers only. Raises `ModelError` for a file that cannot be read.

    `unpack` is taken at its word: the loader keeps weights packed, which takes less, where memory is short.
    """
    return (_gguf if source.kind == "gguf" else _folder)(source, device, unpack, kv_bits)


def expected_device(asked: str | None) -> DeviceKind:
    """The device that MLX will choose, by what is installed: importing MLX to ask it would cost a second."""
    if asked == "cpu":
        return "cpu"
    if sys.platform == "darwin":
        return "metal" if platform.machine() == "arm64" else "cpu"
    names = (entry.name.lower().replace("_", "-") for entry in metadata.distributions())
    on_cuda = sys.platform == "linux" and any(name.startswith("mlx-cuda") for name in names)
    return "cuda" if on_cuda else "cpu"


def _folder(source: ModelSource, device: DeviceKind, unpack: bool, kv_bits: int) -> Estimate:
    path = source.path / "config.json"
    config = read_object(path)
    stored = folder_tensors(source.path)
    try:
        tensors = {name: tensor for name, tensor in stored.items() if _is_loaded(name, config)}
        packed = _packed_values(tensors, config)
        size = _UNPACKED_SIZE.get(device) if unpack else None
        if device == "cuda" and not packed:
            size = None  # half precision is what it computes fastest already
        experts = 4 if device == "cpu" else None  # it multiplies experts in float32 alone
        total = sum(
            _bytes(name, tensor, packed, (size or experts) if _EXPERTS.search(name) and not packed.get(name) else size)
            for name, tensor in tensors.items()
        )
        text = {name: tensor for name, tensor in tensors.items() if _is_text(name)}
        values = kv_values_per_token(config, _widths(text))
        kept = _kept_bytes(values, size or _usual_size(text), kv_bits, config)
        return Estimate(total, kept, context_length(config))
    except _WRONG as error:
        raise ModelError(f"{path}: {error}") from error


def _kept_bytes(values: int, size: int, bits: int, config: Mapping[str, Any]) -> int:
    """Quantised numbers have a scale and a bias a group, of the size that numbers have otherwise."""
    if not bits:
        return values * size
    return values * bits // 8 + 2 * size * (values // kv_group_size(config))


def _is_loaded(name: str, config: Mapping[str, Any]) -> bool:
    parts = name.split(".")
    tied = "lm_head" in parts and bool(text_part(config).get("tie_word_embeddings"))
    return not tied and (_is_text(name) or (sees(config) and can_load()))


def _is_text(name: str) -> bool:
    return _NOT_TEXT.isdisjoint(name.split("."))


def _packed_values(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, int]:
    """How many numbers each packed tensor holds; 0 for scales and biases, which are gone once it is unpacked.

    Of MLX's layout that is told by the scales: one for each group of numbers, whatever bits a number has.
    """
    settings = config.get("quantization") or config.get("quantization_config") or {}
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        scales = tensors.get(f"{module}.scales")
        if tensor.dtype == "U32" and scales is not None:
            found[name] = scales.values * _group_size(settings, module)
            found[f"{module}.scales"] = found[f"{module}.biases"] = 0
        elif name.endswith(_PACKED_BY_OTHERS):
            found[name] = tensor.nbytes * 8 // int(settings.get("bits") or 4)
    return found


def _group_size(settings: Mapping[str, Any], module: str) -> int:
    """Of this module, if it has settings of its own; else of the whole model."""
    own = settings.get(module)
    group = own.get("group_size") if isinstance(own, dict) else settings.get("group_size")
    if not isinstance(group, int):
        raise ValueError(f"{module} is quantised, and the config names no group_size for it")
    return group


def _bytes(name: str, tensor: StoredTensor, packed: Mapping[str, int], size: int | None) -> int:
    """`size`: bytes of a number once all are unpacked. None: tensors stay as they are in the file."""
    if tensor.dtype.startswith("F8_"):
        return tensor.values * (size or 2)  # mlx-lm turns them into bfloat16 while it loads
    if size is not None and name in packed:
        return packed[name] * size
    return tensor.values * size if size is not None and tensor.dtype in FLOATS else tensor.nbytes


def _usual_size(tensors: Tensors) -> int:
    """Bytes of a number in the type that most floating values have: the type that the model computes in."""
    counts: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.dtype in FLOATS:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.values
    return FLOATS[max(counts, key=lambda name: counts[name])] if counts else 2


def _widths(tensors: Tensors) -> dict[int, int]:
    """By layer, how many numbers its keys and values have together: the rows of the matrices that make them."""
    rows: dict[str, dict[int, int]] = {"k": {}, "v": {}}
    for name, tensor in tensors.items():
        if (match := _KEYS_OR_VALUES.search(name)) and len(tensor.shape) == 2 and tensor.dtype != "U8":
            rows[match[2]][int(match[1])] = tensor.shape[0]
    # A layer of Gemma 4 without a matrix for its values takes its keys.
    return {layer: keys + rows["v"].get(layer, keys) for layer, keys in rows["k"].items()}


def _gguf(source: ModelSource, device: DeviceKind, unpack: bool, kv_bits: int) -> Estimate:
    file = open_gguf(source.path)
    config = gguf_config(file)
    native = not unpack or device not in _UNPACKED_SIZE
    size = 4 if device == "cpu" else 2
    tensors = (tensor for name, tensor in file.tensors.items() if name not in ROPE_TENSORS)
    total = sum(_gguf_bytes(tensor, native, size) for tensor in tensors)
    try:
        kept = _kept_bytes(kv_values_per_token(config, {}), size, kv_bits, config)
    except _WRONG as error:
        raise ModelError(f"{file.path}: {error}") from error
    return Estimate(total, kept, context_length(config))


def _gguf_bytes(tensor: GgufTensor, native: bool, size: int) -> int:
    values = prod(tensor.shape)
    if not native or tensor.kind not in BITS or len(tensor.shape) < 2:
        return values * size
    return values * BITS[tensor.kind] // 8 + 2 * (values // GROUP) * size
