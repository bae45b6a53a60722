"""From files to a model whose every array is evaluated. Owner only."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model

from millstream.backend.device import Device, available_bytes
from millstream.backend.layers.cpu_experts import keep_experts_in_float32
from millstream.backend.weights.gguf import load_gguf_model
from millstream.backend.weights.materialize import evaluate_all
from millstream.backend.weights.vision import load_vision
from millstream.errors import ModelError
from millstream.models.checks import check_folder
from millstream.models.geometry import context_length
from millstream.models.vision import has_mlx_vlm, is_vision_model

log = logging.getLogger(__name__)

# Of the free memory, what unpacked weights may take: the rest is for caches and everything else.
UNPACK_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Any
    config: dict[str, Any]
    weight_bytes: int
    dtype: str
    notes: tuple[str, ...]
    whole: Any = None
    """With its towers, if it sees: then `model` is its language part."""

    @property
    def context_length(self) -> int:
        return context_length(self.config) or 2**20

    @property
    def vocab_size(self) -> int:
        value = self.config.get("vocab_size") or (self.config.get("text_config") or {}).get("vocab_size")
        if not isinstance(value, int):
            raise ModelError("the model's config names no vocab_size")
        return value


LIBRARY_FAILURES = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, ImportError, OSError, RuntimeError,
    MemoryError, AssertionError,
)  # fmt: skip
"""What mlx-lm and mlx-vlm raise for files that they cannot make a model of."""

UNPACKED = {"cpu": mx.float32, "cuda": mx.bfloat16}
"""What packed weights become. The CPU build's BLAS computes float32 only; the CUDA build's 4-bit products collapse in
batches (8B on an H200: 308 tokens/s at 32 rows, against 7,199 in bf16 at 64). Metal's are fast as they are."""


def load(kind: Literal["folder", "gguf"], path: Path, device: Device, *, unpack: bool) -> LoadedModel:
    """`unpack`: turn weights into the form that this device computes fastest, where memory allows."""
    dtype = UNPACKED.get(device.kind) if unpack else None
    if kind == "gguf":
        model, config, notes = _load_gguf(path, device, dtype)
    elif (seeing := is_vision_model(check_folder(path))) and has_mlx_vlm():
        return _load_seeing(path, device, dtype)
    else:
        model, config = _load_folder(path)
        notes = [] if dtype is None else _unpack(model, device, dtype)
        notes += _float_experts(model, device)
        notes += ["it takes no images: mlx-vlm is not installed (pip install 'millstream[vision]')"] if seeing else []
    weight_bytes = evaluate_all(model)
    return LoadedModel(model, config, weight_bytes, _dtype(model), tuple(notes))


def _load_seeing(path: Path, device: Device, dtype: mx.Dtype | None) -> LoadedModel:
    from millstream.backend.generation.media.language_parts import language_part

    try:
        whole, config = load_vision(path)
    except LIBRARY_FAILURES as error:
        raise ModelError(f"{path}: {_first_line(error)}") from error
    notes = [] if dtype is None else _unpack(whole, device, dtype)
    notes += _float_experts(whole, device)
    weight_bytes = evaluate_all(whole)
    return LoadedModel(language_part(whole), config, weight_bytes, _dtype(whole), tuple(notes), whole)


def _load_folder(path: Path) -> tuple[Any, dict[str, Any]]:
    try:
        model, config = load_model(path, lazy=True)
    except LIBRARY_FAILURES as error:
        raise ModelError(f"{path}: {_first_line(error)}") from error
    return model, config


def _load_gguf(path: Path, device: Device, dtype: mx.Dtype | None) -> tuple[Any, dict[str, Any], list[str]]:
    # A file of 4-bit weights grows 8 times in float32; counted so for all, since its size is all that is known here.
    if dtype is not None and path.stat().st_size * 2 * dtype.size < available_bytes(device) * UNPACK_SHARE:
        model, config = load_gguf_model(path, native_quantisation=False, dtype=dtype)
        return model, config, [f"weights unpacked to {_name(dtype)}"]
    model, config = load_gguf_model(path, native_quantisation=True, dtype=mx.float32 if device.is_cpu else mx.bfloat16)
    return model, config, []


def _unpack(model: Any, device: Device, dtype: mx.Dtype) -> list[str]:
    """Quantised weights on every device that has a better form; half-precision ones only where BLAS wants float32."""
    packed = any(name.endswith(".scales") for name, _ in tree_flatten(model.parameters()))
    if not packed and not (dtype == mx.float32 and _dtype(model) != "float32"):
        return []
    need = _unpacked_numbers(model) * dtype.size
    room = int(available_bytes(device) * UNPACK_SHARE)
    if need > room:
        gib = 2**30
        wish = f"{_name(dtype)} would take {need / gib:.1f} GiB"
        return [f"weights kept packed: {wish}, {room / gib:.1f} GiB are free for it"]
    dequantize_model(model)
    model.set_dtype(dtype)
    return [f"weights unpacked to {_name(dtype)}"]


def _float_experts(model: Any, device: Device) -> list[str]:
    changed = keep_experts_in_float32(model) if device.is_cpu else 0
    return ["experts kept in float32: the CPU multiplies them in no other type"] if changed else []


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _unpacked_numbers(model: Any) -> int:
    """How many numbers the weights are. Packed ones stand in words of 32 bits without gaps, also where one lies across
    two words, as those of 3, 5 and 6 bits do."""
    total = 0
    for _, module in model.named_modules():
        bits = module.bits if "scales" in module else 0
        for name, value in module.items():
            if isinstance(value, mx.array) and name not in ("scales", "biases"):
                total += value.size * 32 // bits if bits and name == "weight" else value.size
    return total


def _dtype(model: Any) -> str:
    """The type of most weights, and the bits if they are quantised."""
    sizes: dict[str, int] = {}
    for _, value in tree_flatten(model.parameters()):
        name = _name(value.dtype)
        sizes[name] = sizes.get(name, 0) + value.nbytes
    most = max(sizes, key=lambda name: sizes[name])
    bits = sorted({module.bits for _, module in model.named_modules() if "scales" in module})
    return f"{'/'.join(map(str, bits))}-bit" if bits and most == "uint32" else most


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    line = text.splitlines()[0]
    return f"no {line} in config.json" if isinstance(error, KeyError) else line
