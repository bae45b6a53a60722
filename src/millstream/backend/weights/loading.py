"""Loads a model from a folder or a GGUF file, in the form that its device computes fastest. Owner only."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_model

from millstream.backend.device import Device, available_bytes
from millstream.backend.layers.cpu_experts import use_float32_experts
from millstream.backend.weights.failures import LIBRARY_FAILURES
from millstream.backend.weights.gguf import load_gguf_model
from millstream.backend.weights.materialize import embedding_rows, evaluate_all
from millstream.backend.weights.unpacking import StaysPacked, nothing_packed, quantised_layers, unpacked_layer, within
from millstream.backend.weights.vision import load_vision
from millstream.engine.protocols import Progress, ignore_progress
from millstream.errors import ModelError
from millstream.installed import vision_command
from millstream.models.checks import check_folder
from millstream.models.geometry import context_length
from millstream.models.vision import has_mlx_vlm, is_vision_model

log = logging.getLogger(__name__)

UNPACK_SHARE = 0.6
"""The share of the free memory that unpacked weights may take. The rest is for KV caches and everything else."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Any
    config: dict[str, Any]
    weight_bytes: int
    dtype: str
    notes: tuple[str, ...]
    embedding_rows: int = 0
    """Of the table that was loaded; 0 if that is not known."""
    is_vision: bool = False
    """True if `model` is a vision-language model of mlx-vlm, with its towers."""

    @property
    def context_length(self) -> int:
        return context_length(self.config) or 2**20

    @property
    def vocab_size(self) -> int:
        value = self.config.get("vocab_size") or (self.config.get("text_config") or {}).get("vocab_size")
        if not isinstance(value, int):
            raise ModelError("The model's config.json has no vocab_size.")
        return min(value, self.embedding_rows or value)


UNPACKED = {"cpu": mx.float32, "cuda": mx.bfloat16}
"""The type that quantised weights are unpacked to. BLAS on the CPU computes float32 only; the CUDA build's 4-bit
matmuls collapse in batches (8B on an H200: 308 tokens/s at 32 rows, against 7,199 in bf16 at 64), so weights that our
own kernels do not take are unpacked there. Metal's are fast as they are."""


def load(
    kind: Literal["folder", "gguf"],
    path: Path,
    device: Device,
    *,
    unpack: bool,
    keep_packed: StaysPacked = nothing_packed,
    report: Progress = ignore_progress,
) -> LoadedModel:
    """Load a model and evaluate all of it; `report` follows the bytes.

    `unpack`: convert weights to the type that this device computes fastest, where memory allows. `keep_packed` says
    which quantised layers it computes fastest as they are.
    """
    dtype = UNPACKED.get(device.kind) if unpack else None
    if kind == "gguf":
        model, config, notes = _load_gguf(path, device, dtype, keep_packed, report)
        report = ignore_progress  # the tensors were evaluated and reported one by one
    elif (is_vision := is_vision_model(check_folder(path))) and has_mlx_vlm():
        return _load_vision_model(path, device, dtype, keep_packed, report)
    else:
        model, config = _load_folder(path)
        notes = [] if dtype is None else unpack_weights(model, device, dtype, keep_packed)
        notes += _float_experts(model, device)
        notes += [f"text only: for images, run: {vision_command()}"] if is_vision else []
    weight_bytes = evaluate_all(model, report)
    return LoadedModel(model, config, weight_bytes, dtype_of(model), tuple(notes), embedding_rows(model))


def _load_vision_model(
    path: Path, device: Device, dtype: mx.Dtype | None, keep_packed: StaysPacked, report: Progress
) -> LoadedModel:
    try:
        model, config = load_vision(path)
    except LIBRARY_FAILURES as error:
        raise ModelError(f"{path}: {_first_line(error)}") from error
    notes = [] if dtype is None else unpack_weights(model, device, dtype, within("language_model", keep_packed))
    notes += _float_experts(model, device)
    weight_bytes = evaluate_all(model, report)
    rows = embedding_rows(model.language_model)
    return LoadedModel(model, config, weight_bytes, dtype_of(model), tuple(notes), rows, is_vision=True)


def _load_folder(path: Path) -> tuple[Any, dict[str, Any]]:
    try:
        model, config = load_model(path, lazy=True)
    except LIBRARY_FAILURES as error:
        raise ModelError(f"{path}: {_first_line(error)}") from error
    return model, config


def _load_gguf(
    path: Path, device: Device, dtype: mx.Dtype | None, keep_packed: StaysPacked, report: Progress
) -> tuple[Any, dict[str, Any], list[str]]:
    # 4-bit weights grow eightfold in float32. Every file is counted so, since only its size is known here.
    fits = dtype is not None and path.stat().st_size * 2 * dtype.size < available_bytes(device) * UNPACK_SHARE
    if dtype is not None and fits and keep_packed is nothing_packed:
        model, config = load_gguf_model(path, native_quantisation=False, dtype=dtype, report=report)
        return model, config, [f"weights unpacked to {_name(dtype)}"]
    scales = mx.float32 if device.is_cpu else mx.bfloat16
    model, config = load_gguf_model(path, native_quantisation=True, dtype=scales, report=report)
    return model, config, [] if dtype is None else unpack_weights(model, device, dtype, keep_packed)


def unpack_weights(model: Any, device: Device, dtype: mx.Dtype, keep_packed: StaysPacked = nothing_packed) -> list[str]:
    """Unpack quantised weights, and half-precision ones where BLAS needs float32; not those that `keep_packed` names.
    Returns notes of what was done."""
    layers = quantised_layers(model)
    kept = {name for name, layer in layers if keep_packed(name, layer)}
    others = [(name, layer) for name, layer in layers if name not in kept]
    notes = [f"weights of {len(kept)} layers stay packed"] if kept else []
    if not others and (kept or not (dtype == mx.float32 and dtype_of(model) != "float32")):
        return notes
    need = _unpacked_numbers(model, kept) * dtype.size
    budget = int(available_bytes(device) * UNPACK_SHARE)
    if need > budget:
        gib = 2**30
        amounts = f"{need / gib:.1f} GiB of {budget / gib:.1f} GiB available"
        return [*notes, f"weights not unpacked: {_name(dtype)} would take {amounts}"]
    if others:
        model.update_modules(tree_unflatten([(name, unpacked_layer(layer)) for name, layer in others]))
    if not kept:
        # Else the packed layers' type is the model's.
        model.set_dtype(dtype)
    return [*notes, f"weights{f' of {len(others)} layers' if kept else ''} unpacked to {_name(dtype)}"]


def _float_experts(model: Any, device: Device) -> list[str]:
    changed = use_float32_experts(model) if device.is_cpu else 0
    return ["experts in float32: the CPU has gathered matmuls for no other type"] if changed else []


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _unpacked_numbers(model: Any, kept: Collection[str] = ()) -> int:
    """How many numbers the weights have, but for those layers that are `kept` packed. Quantised ones are packed into
    words of 32 bits without gaps: those of 3, 5 and 6 bits may span two words."""
    total = 0
    for path, module in model.named_modules():
        if path in kept:
            continue
        bits = module.bits if "scales" in module else 0
        for name, value in module.items():
            if isinstance(value, mx.array) and name not in ("scales", "biases"):
                total += value.size * 32 // bits if bits and name == "weight" else value.size
    return total


def dtype_of(model: Any) -> str:
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
