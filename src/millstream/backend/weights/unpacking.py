"""Which layers of a model are quantised, what they are when unpacked, and which ones our kernels take as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from millstream.backend.kernels import packed_tilings
from millstream.backend.layers.expert_ops import experts_stay_packed
from millstream.backend.layers.packed_products import packed_weight

StaysPacked = Callable[[str, Any], bool]
"""Says of the name of a quantised layer, and the layer, if it stays as it is."""


def nothing_packed(name: str, layer: Any) -> bool:
    return False


def kernels_take(name: str, layer: Any) -> bool:
    """True if our CUDA kernels compute with the layer's packed weight."""
    if isinstance(layer, QuantizedSwitchLinear):
        return experts_stay_packed(layer)
    return packed_tilings.fits(packed_weight(layer))


def within(part: str, keep_packed: StaysPacked) -> StaysPacked:
    """The same for one part of a model, and nothing elsewhere."""
    if keep_packed is nothing_packed:
        return nothing_packed
    return lambda name, layer: name.startswith(f"{part}.") and keep_packed(name, layer)


def quantised_layers(model: Any) -> list[tuple[str, Any]]:
    """Those that can be unpacked, by their names."""
    kinds = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def unpacked_layer(layer: Any) -> Any:
    """A plain layer with the same weights, lazily unpacked."""
    weight = mx.dequantize(
        layer["weight"],
        layer["scales"],
        layer.get("biases"),
        layer.group_size,
        layer.bits,
        layer.mode,
        layer.get("global_scale"),
    )
    kind: Any = nn.Linear
    if isinstance(layer, nn.QuantizedEmbedding):
        kind = nn.Embedding
    elif isinstance(layer, QuantizedSwitchLinear):
        kind = SwitchLinear
    plain = kind.__new__(kind)
    nn.Module.__init__(plain)
    plain.weight = weight
    if "bias" in layer:
        plain.bias = layer["bias"]
    return plain
