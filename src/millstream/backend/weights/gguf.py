"""Builds the mlx-lm model of a GGUF file. Owner only.

MLX's own GGUF reader is not used: for Q4_K it returns wrong values, and one tensor of a type that it does not know
fails the whole file.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from millstream.backend.weights.materialize import ByteProgress
from millstream.engine.protocols import Progress, ignore_progress
from millstream.errors import ModelError
from millstream.models.gguf_blocks import GROUP, REPACKED, repack
from millstream.models.gguf_check import check_gguf
from millstream.models.gguf_config import gguf_config
from millstream.models.gguf_file import GgufFile, GgufTensor, open_gguf
from millstream.models.gguf_names import ROPE_TENSORS, parameter_name


def load_gguf_model(
    path: Path | str,
    *,
    dtype: mx.Dtype = mx.float16,
    native_quantisation: bool = True,
    report: Progress = ignore_progress,
) -> tuple[nn.Module, dict[str, Any]]:
    """The model with its weights, and its configuration.

    With `native_quantisation`, tensors that MLX can represent without changing a value stay quantised, with scales in
    `dtype`. All others are unpacked to `dtype`.
    """
    file = open_gguf(path)
    config = gguf_config(file)
    check_gguf(file, config)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    weights = load_gguf_weights(file, dtype=dtype, native_quantisation=native_quantisation, report=report)
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    _quantise_layers(model, weights)
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        why = " ".join(str(error).split())
        raise ModelError(f"{file.path}: the tensors do not fit a {config['model_type']!r} model: {why}") from error
    _use_rope_factors(model, file, config)
    model.eval()
    return model, config


def load_gguf_weights(
    file: GgufFile, *, dtype: mx.Dtype, native_quantisation: bool, report: Progress = ignore_progress
) -> dict[str, mx.array]:
    """Every parameter by its mlx-lm name; a quantised matrix is three: `weight`, `scales` and `biases`."""
    weights: dict[str, mx.array] = {}
    progress = ByteProgress(sum(tensor.data.nbytes for tensor in file.tensors.values()), report)
    for tensor in file.tensors.values():
        if tensor.name not in ROPE_TENSORS:
            weights.update(_parameters(file, tensor, dtype, native_quantisation))
        progress.add(tensor.data.nbytes)
    progress.finish()
    return weights


def _parameters(file: GgufFile, tensor: GgufTensor, dtype: mx.Dtype, native_quantisation: bool) -> dict[str, mx.array]:
    """The parameters that one tensor becomes."""
    name = parameter_name(file.architecture, tensor.name)
    if name is None:
        raise ModelError(f"{file.path}: tensor {tensor.name!r} is not known for architecture {file.architecture!r}.")
    if native_quantisation and tensor.kind in REPACKED and len(tensor.shape) > 1:
        return _quantised(name.removesuffix(".weight"), tensor, dtype)
    # Gemma's norms multiply by 1 + weight; the file has the sum.
    shift = -1.0 if file.architecture == "gemma3" and name.endswith("norm.weight") else 0.0
    return {name: _unpacked(tensor, dtype, shift)}


def _quantised(module: str, tensor: GgufTensor, dtype: mx.Dtype) -> dict[str, mx.array]:
    packed = repack(tensor.kind, tensor.shape, tensor.data)
    scales, biases = (mx.array(values).astype(dtype) for values in (packed.scales, packed.biases))
    mx.eval(scales, biases)
    return {f"{module}.weight": mx.array(packed.words), f"{module}.scales": scales, f"{module}.biases": biases}


def _unpacked(tensor: GgufTensor, dtype: mx.Dtype, shift: float) -> mx.array:
    """The tensor in `dtype`. Evaluated here, or the float32 values of the whole model would wait for their cast."""
    if tensor.kind == "BF16":
        values = mx.array(np.ascontiguousarray(tensor.data).view(np.uint16)).view(mx.bfloat16)
    elif tensor.kind == "F16":
        values = mx.array(np.ascontiguousarray(tensor.data))
    else:
        values = mx.array(tensor.floats())
    values = (values + shift if shift else values).astype(dtype)
    mx.eval(values)
    return values


def _quantise_layers(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Quantise the layers that have scales. A group of 32 values has as many words as a value has bits."""
    bits = {
        name.removesuffix(".scales"): weights[f"{name.removesuffix('.scales')}.weight"].shape[-1] // scales.shape[-1]
        for name, scales in weights.items()
        if name.endswith(".scales")
    }

    def layout(path: str, _: nn.Module) -> dict[str, int] | bool:
        return {"group_size": GROUP, "bits": bits[path]} if path in bits else False

    if bits:
        nn.quantize(model, group_size=GROUP, class_predicate=layout)


def _use_rope_factors(model: nn.Module, file: GgufFile, config: dict[str, Any]) -> None:
    """Llama 3.1 and later: the file has a factor per RoPE frequency instead of the parameters of the scaling."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return
    rope = FactorRope(config["head_dim"], config["rope_theta"], tensor.floats(), config.get("rope_traditional", False))
    for layer in model.layers:
        layer.self_attn.rope = rope


class FactorRope(nn.Module):  # type: ignore[misc]
    """RoPE in which every frequency is divided by its own factor."""

    def __init__(self, dims: int, base: float, factors: np.ndarray[Any, Any], traditional: bool) -> None:
        super().__init__()
        self._dims = dims
        self._traditional = traditional
        self._freqs = mx.array(factors) * base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
        mx.eval(self._freqs)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(
            x, self._dims, traditional=self._traditional, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )
