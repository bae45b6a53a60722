"""What a mixture of experts is made of, as data: read from its submodules, weights and attributes.

How the router's logits become choices and weights cannot be seen in the module tree. The attributes leave a few
possibilities (`routings`); `fused_experts` takes the one whose numbers agree with the module's.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU

from millstream.backend.generation.layers.block_frame import NotUnderstood
from millstream.backend.generation.layers.block_parts import GluParts, glu_parts, weight_of
from millstream.backend.kernels.expert_matmul import MAX_ROWS, Activation, ExpertWeights
from millstream.backend.kernels.expert_routing import Router, Routing, new_counter
from millstream.backend.kernels.weights import Dense
from millstream.backend.layers.expert_ops import activate, expert_weights

SLOTS = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "k")
NORMALISED = ("norm_topk_prob", "norm_topk", "moe_renormalize", "route_norm")
SCALE = ("routed_scaling_factor", "route_scale", "router_scaling_factor")
GROUPS, BEST_GROUPS = ("n_group", "num_expert_group"), ("topk_group", "n_group_topk")
SHARED, SHARED_GATE = ("shared_expert", "shared_experts", "shared_mlp"), ("shared_expert_gate",)
SCORES: tuple[Literal["softmax", "sigmoid", "softmax_chosen"], ...] = ("softmax", "sigmoid", "softmax_chosen")
AGREED = 1e-5
"""How far activations may be apart, in float32 and relative to their size: GELU and its approximation are 1e-4."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertParts:
    gate: ExpertWeights
    up: ExpertWeights
    down: ExpertWeights
    activation: Activation
    router: Router
    routing: Routing
    shared: GluParts | None = None
    """An expert that all rows go through."""
    shared_module: Any = None
    """The same, as its module."""


def expert_layer(module: Any) -> Any:
    """The layer of experts in a module; None if there is none, or several."""
    found = [child for _, child in module.named_modules() if isinstance(child, SwitchGLU)]
    return found[0] if len(found) == 1 else None


def switch_parts(switch: Any) -> tuple[ExpertWeights, ExpertWeights, ExpertWeights, Activation]:
    """The projections of a layer of experts, gate, up and down, and its activation."""
    gate, up, down = (_weights(switch[name]) for name in ("gate_proj", "up_proj", "down_proj"))
    if gate.packing != up.packing or (gate.bias is None) != (up.bias is None):
        raise NotUnderstood("has experts whose gates are packed otherwise than what they open")
    return gate, up, down, _activation(switch.activation)


def expert_parts(module: Any, dtype: mx.Dtype) -> Iterator[ExpertParts]:
    """What the module may be made of, likeliest first. Raises `NotUnderstood` if it is something else."""
    switch = expert_layer(module)
    if switch is None:
        raise NotUnderstood("has no layer of experts that is known")
    gate, up, down, activation = switch_parts(switch)
    shared, shared_module, shared_gate = _shared(module)
    router, holder = _router(module, switch, gate.experts, gate.inputs, dtype)
    if shared_gate is not None:
        router = dataclasses.replace(router, weight=mx.concatenate([router.weight, _dense(shared_gate, dtype)]))
    mx.eval([array for array in (router.weight, router.bias, router.correction) if array is not None])
    for routing in routings(module, holder, gate.experts):
        yield ExpertParts(gate, up, down, activation, router, routing, shared, shared_module)


def routings(module: Any, holder: Any, experts: int) -> Iterator[Routing]:
    """What the attributes of a module and of its router leave open."""
    places = (holder, module, getattr(module, "config", None), getattr(module, "args", None))
    slots = _attribute(places, SLOTS)
    if not isinstance(slots, int) or not 0 < slots <= experts:
        raise NotUnderstood("does not say how many experts a token has")
    normalised = _attribute(places, NORMALISED)
    scale = float(_attribute(places, SCALE) or 1.0)
    groups, best = _attribute(places, GROUPS) or 1, _attribute(places, BEST_GROUPS) or 1
    sure = (bool(normalised),) if normalised is not None else ()
    norms = (*sure, *(each for each in (False, True) if each not in sure))
    grouped = [(groups, best), (1, 1)] if groups > 1 else [(1, 1)]
    for (some, few), normed, score in itertools.product(grouped, norms, SCORES):
        if score == "softmax_chosen" and normed:
            continue
        usual: tuple[Literal["max", "best_two"], ...] = (
            ("best_two", "max") if score == "sigmoid" else ("max", "best_two")
        )
        for kind in usual if some > 1 else usual[:1]:
            yield Routing(experts, slots, score, normed, 0.0, scale, some, few, kind)


def _weights(layer: Any) -> ExpertWeights:
    weights = expert_weights(layer)
    if weights is None:
        raise NotUnderstood(f"has experts of another kind ({type(layer).__name__})")
    return weights


def _activation(module: Any) -> Activation:
    """Found by its numbers. Its arguments are what the gate opens, and the gate."""
    up, gate = (4 * mx.random.normal((256,), key=mx.random.key(seed)) for seed in (1, 2))
    alpha, limit = getattr(module, "_alpha", 1.702), getattr(module, "_limit", 7.0)
    expected = module(up, gate)
    for known in (Activation("silu"), Activation("gelu_tanh"), Activation("clipped", float(alpha), float(limit))):
        apart = mx.linalg.norm(activate(known, gate, up) - expected)
        if (apart <= AGREED * mx.linalg.norm(expected)).item():
            return known
    raise NotUnderstood(f"has another activation ({type(module).__name__})")


def _shared(module: Any) -> tuple[GluParts | None, Any, Any]:
    """The expert that all rows go through, as parts and as a module, and its gate."""
    shared = next((module[name] for name in SHARED if isinstance(module.get(name), nn.Module)), None)
    gate = next((module[name] for name in SHARED_GATE if isinstance(module.get(name), nn.Module)), None)
    parts = None if shared is None else glu_parts(shared)
    if shared is not None and parts is None:
        raise NotUnderstood(f"has a shared expert of another kind ({type(shared).__name__})")
    return parts, shared, gate


def _router(module: Any, switch: Any, experts: int, size: int, dtype: mx.Dtype) -> tuple[Router, Any]:
    """The router's arrays, and the module that holds them."""
    inside = {id(each) for _, each in switch.named_modules()}
    found = [
        (each, weight)
        for _, each in module.named_modules()
        if id(each) not in inside and (weight := _router_weight(each, experts, size, dtype)) is not None
    ]
    if len(found) != 1:
        raise NotUnderstood(f"has {len(found)} routers")
    holder, weight = found[0]
    vectors = [
        (name, value)
        for each in (module, holder)
        for name, value in each.items()
        if isinstance(value, mx.array) and value.shape == (experts,)
    ]
    bias = next((value for name, value in vectors if name == "bias"), None)
    corrections = [value for name, value in vectors if name != "bias"]
    correction = corrections[0].astype(mx.float32) if corrections else None
    parent = next(
        (each for _, each in module.named_modules() if any(child is holder for child in each.values())),
        holder,
    )
    keeper = holder if _attribute((holder,), SLOTS) is not None else parent
    return Router(weight, new_counter(MAX_ROWS), bias, correction), keeper


def _router_weight(module: Any, experts: int, size: int, dtype: mx.Dtype) -> mx.array | None:
    """The weight if this module maps a row to a number per expert."""
    weight = weight_of(module)
    if weight is not None:
        return _dense(module, dtype) if (weight.outputs, weight.inputs) == (experts, size) else None
    array = module.get("weight")
    return array if isinstance(array, mx.array) and array.shape == (experts, size) else None


def _dense(layer: Any, dtype: mx.Dtype) -> mx.array:
    """A router is small: it is unpacked."""
    weight = weight_of(layer)
    if isinstance(weight, Dense):
        return weight.weight
    assert weight is not None, "a linear layer has a weight"
    return mx.dequantize(
        weight.packed,
        weight.scales,
        weight.biases,
        group_size=weight.group_size,
        bits=weight.bits,
        mode=weight.mode,
    ).astype(dtype)


def _attribute(places: Sequence[Any], names: Sequence[str]) -> Any:
    values = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in values if value is not None), None)
