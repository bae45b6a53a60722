"""Estimates a model's memory before it is loaded: weights, and KV cache per token. Reads file headers only; no MLX."""

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
from millstream.models.vision import has_mlx_vlm, is_vision_model

DeviceKind = Literal["cpu", "cuda", "metal"]
Tensors = Mapping[str, StoredTensor]

_DEQUANTIZED_SIZE = {"cpu": 4, "cuda": 2}
"""Bytes per value of the type that the loader dequantises weights to: all on the CPU, and on CUDA experts that our
kernels do not take. Metal computes on quantised weights."""
_PACKED_EXPERT_BITS = (4, 8)
"""Bits per value of experts that CUDA computes on as they are."""
_OTHER_MODULES = frozenset(
    {"vision_tower", "vision_model", "vision_embedder", "visual", "audio_tower", "multi_modal_projector"}
    | {"embed_vision", "embed_audio", "mtp"}
)
"""Modules that mlx-lm does not load."""
_EXPERTS = re.compile(r"\b(experts|switch_mlp)\.(?!.*(scales|biases)$)")
_OF_EXPERTS = re.compile(r"\b(experts|switch_mlp)\.")
_KV_PROJECTION = re.compile(r"\blayers\.(\d+)\..*\b([kv])_proj\.weight$")
_BAD_CONFIG = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
"""Exceptions that a damaged configuration can cause."""
_OTHER_QUANTIZED = (".qweight", ".weight_packed", "_blocks")


@dataclass(frozen=True, slots=True)
class Estimate:
    weight_bytes: int
    """In memory, once loaded."""
    kv_bytes_per_token: int
    """KV cache of one token in all layers; 0 for a model without attention."""
    context_length: int | None

    def __add__(self, draft: Estimate) -> Estimate:
        """With a draft model, which has a KV cache of its own for every row."""
        return Estimate(
            self.weight_bytes + draft.weight_bytes,
            self.kv_bytes_per_token + draft.kv_bytes_per_token,
            self.context_length,
        )


def estimate(source: ModelSource, *, device: DeviceKind, unpack: bool, kv_bits: int = 0) -> Estimate:
    """Raises `ModelError` if a file cannot be read.

    With `unpack` the estimate counts dequantised weights, although the loader leaves them quantised if memory is short.
    On CUDA those are experts of unusual bits alone: our kernels take all other weights as they are.
    """
    return (_gguf if source.kind == "gguf" else _folder)(source, device, unpack, kv_bits)


def estimate_weights(source: ModelSource, device: DeviceKind) -> int:
    """Bytes of an encoder's weights once loaded: on the CPU it computes in float32."""
    if source.kind == "gguf":
        return estimate(source, device=device, unpack=device == "cpu").weight_bytes
    tensors = folder_tensors(source.path)
    if device != "cpu":
        return sum(tensor.nbytes for tensor in tensors.values())
    try:
        quantized = quantized_values(tensors, read_object(source.path / "config.json"))
    except _BAD_CONFIG as error:
        raise ModelError(f"{source.path / 'config.json'}: {error}") from error
    return sum(4 * quantized.get(name, tensor.values) for name, tensor in tensors.items())


def expected_device(requested: str | None) -> DeviceKind:
    """The device that MLX will use, by the installed packages: importing MLX to ask would take a second."""
    if requested == "cpu":
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
        quantized = quantized_values(tensors, config)
        size = _DEQUANTIZED_SIZE.get(device) if unpack else None
        packed = None if device == "cuda" else size  # CUDA computes on quantised weights
        if device == "cuda" and not quantized:
            size = None  # half precision weights are loaded as they are
        experts = 4 if device == "cpu" else None  # the CPU multiplies experts in float32 only

        def value_size(name: str) -> int | None:
            if _EXPERTS.search(name) and not quantized.get(name):
                return size or experts
            return size if _OF_EXPERTS.search(name) and not _stays_packed(name, tensors, quantized) else packed

        total = sum(_bytes(name, tensor, quantized, value_size(name)) for name, tensor in tensors.items())
        text = {name: tensor for name, tensor in tensors.items() if _is_language_model(name)}
        values = kv_values_per_token(config, _kv_widths(text))
        kv_bytes = _kv_bytes(values, size or _float_size(text), kv_bits, config)
        return Estimate(total, kv_bytes, context_length(config))
    except _BAD_CONFIG as error:
        raise ModelError(f"{path}: {error}") from error


def _stays_packed(name: str, tensors: Tensors, quantized: Mapping[str, int]) -> bool:
    """True for a tensor of experts whose bits per value our CUDA kernels take."""
    weight = f"{name.rpartition('.')[0]}.weight"
    values = quantized.get(weight, 0)
    return values > 0 and tensors[weight].nbytes * 8 // values in _PACKED_EXPERT_BITS


def _kv_bytes(values: int, size: int, bits: int, config: Mapping[str, Any]) -> int:
    """A quantised KV cache has a scale and a bias per group, of `size` bytes each."""
    if not bits:
        return values * size
    return values * bits // 8 + 2 * size * (values // kv_group_size(config))


def _is_loaded(name: str, config: Mapping[str, Any]) -> bool:
    parts = name.split(".")
    tied = "lm_head" in parts and bool(text_part(config).get("tie_word_embeddings"))
    return not tied and (_is_language_model(name) or (is_vision_model(config) and has_mlx_vlm()))


def _is_language_model(name: str) -> bool:
    return _OTHER_MODULES.isdisjoint(name.split("."))


def quantized_values(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, int]:
    """The number of values of each quantised tensor; 0 for scales and biases, which dequantising removes.

    In MLX's layout it follows from the scales: there is one per group of values, regardless of the bits per value.
    """
    settings = config.get("quantization") or config.get("quantization_config") or {}
    values: dict[str, int] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        scales = tensors.get(f"{module}.scales")
        if tensor.dtype == "U32" and scales is not None:
            values[name] = scales.values * _group_size(settings, module)
            values[f"{module}.scales"] = values[f"{module}.biases"] = 0
        elif name.endswith(_OTHER_QUANTIZED):
            values[name] = tensor.nbytes * 8 // int(settings.get("bits") or 4)
    return values


def _group_size(settings: Mapping[str, Any], module: str) -> int:
    """The module's own group size, or else the model's."""
    own = settings.get(module)
    group = own.get("group_size") if isinstance(own, dict) else settings.get("group_size")
    if not isinstance(group, int):
        raise ValueError(f"{module} is quantised, but config.json has no group_size for it")
    return group


def _bytes(name: str, tensor: StoredTensor, quantized: Mapping[str, int], size: int | None) -> int:
    """`size`: bytes per value after dequantising. None: tensors are loaded as they are stored."""
    if tensor.dtype.startswith("F8_"):
        return tensor.values * (size or 2)  # mlx-lm converts them to bfloat16 when it loads
    if size is not None and name in quantized:
        return quantized[name] * size
    return tensor.values * size if size is not None and tensor.dtype in FLOATS else tensor.nbytes


def _float_size(tensors: Tensors) -> int:
    """Bytes per value of the most common float type: the type that the model computes in."""
    counts: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.dtype in FLOATS:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.values
    return FLOATS[max(counts, key=lambda name: counts[name])] if counts else 2


def _kv_widths(tensors: Tensors) -> dict[int, int]:
    """By layer: values of its keys and values per token, from the shapes of the projection weights."""
    rows: dict[str, dict[int, int]] = {"k": {}, "v": {}}
    for name, tensor in tensors.items():
        if (match := _KV_PROJECTION.search(name)) and len(tensor.shape) == 2 and tensor.dtype != "U8":
            rows[match[2]][int(match[1])] = tensor.shape[0]
    # A Gemma 4 layer without a value projection uses its keys as values.
    return {layer: keys + rows["v"].get(layer, keys) for layer, keys in rows["k"].items()}


def _gguf(source: ModelSource, device: DeviceKind, unpack: bool, kv_bits: int) -> Estimate:
    file = open_gguf(source.path)
    config = gguf_config(file)
    native = not unpack or device not in _DEQUANTIZED_SIZE
    size = 4 if device == "cpu" else 2
    tensors = [tensor for name, tensor in file.tensors.items() if name not in ROPE_TENSORS]
    total = sum(_gguf_bytes(each, native or device == "cuda", size) for each in tensors)
    try:
        kv_bytes = _kv_bytes(kv_values_per_token(config, {}), size, kv_bits, config)
    except _BAD_CONFIG as error:
        raise ModelError(f"{file.path}: {error}") from error
    return Estimate(total, kv_bytes, context_length(config))


def _gguf_bytes(tensor: GgufTensor, native: bool, size: int) -> int:
    values = prod(tensor.shape)
    if not native or tensor.kind not in BITS or len(tensor.shape) < 2:
        return values * size
    return values * BITS[tensor.kind] // 8 + 2 * (values // GROUP) * size
