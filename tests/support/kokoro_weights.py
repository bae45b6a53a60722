"""Kokoro's weights as the original names them, from a file for ONNX Runtime."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def original_weights(model: Any) -> dict[str, Array]:
    """Names and shapes of `kokoro-v1_0.pth`. Weight normalisation was folded: v is the weight, g is its length."""
    from onnx import numpy_helper

    stored: dict[str, Array] = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    weights = {_original(name): value for name, value in stored.items() if _is_named(name)}
    for node in model.graph.node:
        name = _original(node.name.strip("/").replace("/", "."))
        if node.op_type in ("Conv", "ConvTranspose") and len(node.input) > 1 and node.input[1] in stored:
            if _is_named(node.input[1]) or ".istft." in name:
                continue  # not normalised, or no weight at all
            layer = _layer(node, name)
            weight = stored[node.input[1]]
            norm = np.sqrt(np.sum(weight**2, axis=(1, 2), keepdims=True))
            weights |= {f"{layer}.weight_v": weight, f"{layer}.weight_g": norm}
        elif node.op_type == "MatMul" and node.input[1] in stored:
            weights[f"{_matmul(name)}.weight"] = stored[node.input[1]].T
        elif node.op_type == "LSTM":
            weights |= _lstm(name.removesuffix(".LSTM"), *(stored[each] for each in node.input[1:4]))
    return {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}


def _is_named(name: str) -> bool:
    return name.startswith(("encoder.", "decoder.")) and ".istft." not in name


def _original(name: str) -> str:
    name = name.removeprefix("encoder.").removeprefix("decoder.")
    return re.sub(r"^(F0\.|N\.|shared$|shared\.)", r"predictor.\1", name)


def _layer(node: Any, name: str) -> str:
    """By the name of its bias; those without one are named by their place."""
    if len(node.input) > 2:
        return _original(node.input[2]).removesuffix(".bias")
    return f"{name.rsplit('.', 1)[0].removesuffix('.conv1x1')}.conv1x1"


def _matmul(name: str) -> str:
    """ALBERT's layers share their weights, so the same layer occurs many times, with numbers."""
    return re.sub(r"_\d+$", "", re.sub(r"\.MatMul(_\d+)?$", "", name))


def _lstm(layer: str, inputs: Array, recurrent: Array, biases: Array) -> dict[str, Array]:
    """ONNX has the gates in the order i, o, f, c; PyTorch i, f, c, o."""

    def gates(value: Array) -> Array:
        i, o, f, c = np.split(value, 4)
        return np.concatenate([i, f, c, o])

    found: dict[str, Array] = {}
    for direction, suffix in enumerate(("_l0", "_l0_reverse")):
        of_inputs, of_hidden = np.split(biases[direction], 2)
        found |= {
            f"{layer}.weight_ih{suffix}": gates(inputs[direction]),
            f"{layer}.weight_hh{suffix}": gates(recurrent[direction]),
            f"{layer}.bias_ih{suffix}": gates(of_inputs),
            f"{layer}.bias_hh{suffix}": gates(of_hidden),
        }
    return found
