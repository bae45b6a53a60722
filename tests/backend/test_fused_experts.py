"""Mixtures of experts in fused blocks, against the modules of mlx-lm that they replace."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models import qwen3_moe
from mlx_lm.models.switch_layers import SwitchGLU

from millstream.backend.generation.layers.block_check import checked_frame
from millstream.backend.generation.layers.block_frame import NotUnderstood
from millstream.backend.generation.layers.expert_parts import expert_parts
from millstream.backend.generation.layers.fused_experts import FusedExperts, fuse_experts
from millstream.backend.generation.layers.fused_parts import PlainPart
from millstream.backend.generation.layers.patched_experts import (
    FusedMixture,
    fuse_expert_layer,
    fuse_mixture,
    restore_mixtures,
)
from millstream.backend.kernels.expert_matmul import ExpertWeights, Packing, fits
from millstream.backend.kernels.expert_routing import Router, Routing, new_counter, route_fits
from millstream.backend.layers import expert_ops
from millstream.backend.layers.expert_ops import route
from millstream.backend.layers.fused_matmul import BY_MLX
from millstream.backend.layers.projections import fuse_projections
from support.tiny import BASE

SIZE = BASE["hidden_size"]
_EXPERTS = {
    **BASE,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "shared_expert_intermediate_size": 32,
}
_LOCAL = {**BASE, "num_local_experts": 8, "num_experts_per_tok": 3}
_ROUTED = {
    **BASE,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "rope_scaling": None,
}
_YARN = {"type": "yarn", "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 512}
_LINEAR_ATTENTION = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}
FUSED: dict[str, tuple[dict[str, Any], str]] = {
    "qwen2_moe": (_EXPERTS, "softmax"),
    "qwen3_moe": (_EXPERTS, "softmax"),
    "qwen3_next": ({**_EXPERTS, **_LINEAR_ATTENTION}, "softmax"),
    "glm4_moe": (
        {**_ROUTED, "use_qk_norm": True, "attention_bias": False, "partial_rotary_factor": 0.5, "n_group": 1},
        "sigmoid",
    ),
    "deepseek_v2": ({**_ROUTED, "topk_method": "group_limited_greedy", "rope_scaling": _YARN}, "softmax"),
    "deepseek_v3": (_ROUTED, "sigmoid"),
    "dots1": ({**_ROUTED, "scoring_func": "sigmoid"}, "sigmoid"),
    "gpt_oss": (
        {**_LOCAL, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        "softmax_chosen",
    ),
    "mixtral": (_LOCAL, "softmax_chosen"),
    "olmoe": ({**_EXPERTS, "norm_topk_prob": False}, "softmax"),
    "lfm2_moe": (
        {
            **_EXPERTS,
            "conv_bias": False,
            "conv_L_cache": 3,
            "norm_eps": 1e-5,
            "num_dense_layers": 0,
            "use_expert_bias": True,
            "layer_types": ["conv", "full_attention"],
            "full_attn_idxs": [1],
        },
        "sigmoid",
    ),
    "granitemoe": (
        {
            **_LOCAL,
            **dict.fromkeys(("logits_scaling", "attention_multiplier", "embedding_multiplier"), 0.5),
            "residual_multiplier": 0.22,
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": None,
        },
        "softmax_chosen",
    ),
    "bailing_moe": (
        {
            **_EXPERTS,
            "num_shared_experts": 1,
            "use_bias": False,
            "use_qkv_bias": False,
            "norm_head": False,
            "norm_softmax": False,
            "first_k_dense_replace": 0,
        },
        "softmax",
    ),
}


def make(family: str, config: dict[str, Any]) -> Any:
    """Two layers, with weights as large as those of a trained model; correction biases and gates are not zeros."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict({**config, "model_type": family, "num_hidden_layers": 2}))
    mx.random.seed(5)
    model.update(
        tree_map(
            lambda value: mx.random.normal(value.shape) * (value.shape[-1] ** -0.5 if value.ndim > 1 else 0.2),
            model.parameters(),
        )
    )
    return model


def halves(block: Any, dtype: mx.Dtype = mx.float32) -> tuple[FusedExperts, PlainPart]:
    frame = checked_frame(block)
    assert frame.mlp is not None
    plain = PlainPart(frame, frame.before_mlp, frame.after_mlp, block[frame.mlp])
    return fuse_experts(block[frame.mlp], frame, plain.run, BY_MLX, SIZE, dtype), plain


def rows_of(count: int) -> mx.array:
    return mx.random.normal((count, 1, SIZE), key=mx.random.key(7))


@pytest.mark.parametrize(("family", "config", "score"), [(name, *rest) for name, rest in FUSED.items()], ids=FUSED)
def test_the_routing_of_a_family_is_found(family: str, config: dict[str, Any], score: str) -> None:
    model = make(family, config)
    fuse_projections(model)
    block = model.layers[1]
    fused, plain = halves(block)
    routing = fused.parts.routing
    assert (routing.score, routing.experts, routing.slots) == (score, 8, 3)
    if family in ("deepseek_v2", "deepseek_v3", "dots1"):
        kind = "max" if family == "deepseek_v2" else "best_two"
        assert (routing.groups, routing.best_groups, routing.group_score, routing.scale) == (4, 2, kind, 2.5)
    x = rows_of(5)
    expected, got = plain.run(x), fused.run(x)
    np.testing.assert_allclose(np.array(got), np.array(expected), rtol=1e-4, atol=1e-4)
    # Vacant rows have no experts, and the others do not notice.
    some = fused.run(x, mx.array([3, -1, 0, -1, 9], dtype=mx.int32))
    np.testing.assert_allclose(np.array(some)[[0, 2, 4]], np.array(expected)[[0, 2, 4]], rtol=1e-4, atol=1e-4)


def test_a_router_is_launched_once_per_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of one layer that may run at the same time would count in the same memory."""
    launched: list[int] = []
    run, evaluate = FusedExperts.run, mx.eval

    def launch(self: FusedExperts, x: mx.array, live: mx.array | None = None) -> mx.array:
        launched.append(1)
        return run(self, x, live)

    def counted(*arrays: Any) -> None:
        assert len(launched) <= 1
        launched.clear()
        evaluate(*arrays)

    monkeypatch.setattr(FusedExperts, "run", launch)
    monkeypatch.setattr(mx, "eval", counted)
    config, _ = FUSED["qwen3_moe"]
    halves(make("qwen3_moe", config).layers[1])


def test_packed_experts_and_a_packed_router_give_what_they_gave() -> None:
    model = make("qwen3_moe", _EXPERTS)
    nn.quantize(model, group_size=32, bits=8)
    fused, plain = halves(model.layers[0])
    x = rows_of(9)
    np.testing.assert_allclose(np.array(fused.run(x)), np.array(plain.run(x)), rtol=1e-3, atol=1e-3)
    switch = model.layers[0].mlp.switch_mlp
    assert switch.gate_proj.bits == 8, "experts stay packed"


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_mixture_computes_the_tokens_of_a_prompt_as_before(family: str, packed: bool) -> None:
    config, _ = FUSED[family]
    model = make(family, config)
    fuse_projections(model)
    block = model.layers[1]
    module = block[checked_frame(block).mlp]
    if packed:
        nn.quantize(module, group_size=32, bits=8)
    fused, _ = halves(block)
    prompts = mx.random.normal((2, 45, SIZE), key=mx.random.key(8))
    expected, kind = module(prompts), type(module)
    fuse_mixture(module, fused.parts, expert_ops.BY_MLX, expert_ops.BY_MLX, mx.float32)
    calls: list[int] = []
    mixed = module._mixed
    module._mixed = Spy(mixed, calls)
    np.testing.assert_allclose(np.array(module(prompts)), np.array(expected), rtol=1e-3, atol=1e-3)
    assert calls == [90], "all tokens go through at once"
    half = prompts.astype(mx.bfloat16)
    assert module(half).shape == half.shape and calls == [90], "rows of another type are the module's own business"
    module._mixed = mixed
    restore_mixtures(model)
    assert type(module) is kind and not hasattr(module, "_mixed")


@pytest.mark.parametrize(("family", "whole"), [("qwen3_moe", True), ("gpt_oss", True), ("glm4_moe", False)])
def test_norm_and_residual_are_part_of_a_pass(family: str, whole: bool) -> None:
    config, _ = FUSED[family]
    model = make(family, config)
    fuse_projections(model)
    block = model.layers[1]
    fused, plain = halves(block)
    mixture = FusedMixture(fused.parts, expert_ops.BY_MLX, expert_ops.BY_MLX, mx.float32)
    chunk = mixture.with_frame(checked_frame(block))
    assert (chunk is not None) is whole, "a shared expert reads normed rows"
    if chunk is None:
        return
    prompts = mx.random.normal((2, 30, SIZE), key=mx.random.key(9))
    np.testing.assert_allclose(np.array(chunk.run(prompts)), np.array(plain.run(prompts)), rtol=1e-3, atol=1e-3)
    x = rows_of(70)
    live = mx.array([row % 9 - 1 for row in range(70)], dtype=mx.int32)
    seen = np.array(live) >= 0
    expected, got = np.array(plain.run(x)), np.array(chunk.run(x, live))
    np.testing.assert_allclose(got[seen], expected[seen], rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(got[~seen], np.array(x)[~seen], "a row that nobody reads has no expert")


class Spy:
    def __init__(self, mixed: Any, calls: list[int]) -> None:
        self._mixed, self._calls, self.takes = mixed, calls, mixed.takes

    def __call__(self, x: mx.array) -> mx.array:
        self._calls.append(x.size // x.shape[-1])
        out: mx.array = self._mixed(x)
        return out


def test_a_mixture_that_would_differ_is_left_alone() -> None:
    config, _ = FUSED["qwen3_moe"]
    block = make("qwen3_moe", config).layers[1]
    fused, _ = halves(block)
    other = dataclasses.replace(fused.parts.routing, scale=1.5)
    kind = type(block.mlp)
    with pytest.raises(NotUnderstood, match="differs by"):
        fuse_mixture(
            block.mlp,
            dataclasses.replace(fused.parts, routing=other),
            expert_ops.BY_MLX,
            expert_ops.BY_MLX,
            mx.float32,
        )
    assert type(block.mlp) is kind


@pytest.mark.parametrize("tokens", [3, 20, 45])
def test_tokens_of_a_chunk_go_to_the_layer_of_experts(tokens: int) -> None:
    mlp = make("qwen2_moe", _EXPERTS).layers[0].mlp
    nn.quantize(mlp, group_size=32, bits=8)
    x = mx.random.normal((2, tokens, SIZE), key=mx.random.key(8))
    expected = mlp(x)
    assert fuse_expert_layer(mlp, BY_MLX, mx.float32)
    assert mlp.switch_mlp._fused.takes(x)
    np.testing.assert_allclose(np.array(mlp(x)), np.array(expected), rtol=1e-3, atol=1e-3)


class Dimmed(qwen3_moe.Qwen3MoeSparseMoeBlock):  # type: ignore[misc]
    """What a later version of a family may do."""

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = super().__call__(x) * mx.sigmoid(x)
        return out


def test_a_mixture_that_does_something_else_keeps_its_own_routing() -> None:
    model = make("qwen3_moe", _EXPERTS)
    block = model.layers[0]
    block.mlp.__class__ = Dimmed
    with pytest.raises(NotUnderstood, match="differs by"):
        halves(block)
    x = rows_of(6)
    expected = block.mlp(x)
    assert fuse_expert_layer(block.mlp, BY_MLX, mx.float32)
    assert isinstance(block.mlp.switch_mlp, SwitchGLU) and type(block.mlp.switch_mlp) is not SwitchGLU
    np.testing.assert_allclose(np.array(block.mlp(x)), np.array(expected), rtol=1e-4, atol=1e-4)
    prompt = mx.random.normal((1, 40, SIZE))
    got = block.mlp(prompt)
    block.mlp.switch_mlp.__class__ = SwitchGLU
    np.testing.assert_allclose(np.array(got), np.array(block.mlp(prompt)), rtol=1e-4, atol=1e-4)


def test_experts_with_another_activation_are_left_alone() -> None:
    model = make("qwen3_moe", _EXPERTS)
    mlp = model.layers[0].mlp
    mlp.switch_mlp.activation = lambda up, gate: mx.tanh(gate) * up
    with pytest.raises(NotUnderstood, match="another activation"):
        halves(model.layers[0])
    assert not fuse_expert_layer(mlp, BY_MLX, mx.float32)


def test_without_a_number_of_experts_per_token_nothing_is_guessed() -> None:
    model = make("qwen3_moe", _EXPERTS)
    del model.layers[0].mlp.top_k
    with pytest.raises(NotUnderstood, match="how many experts"):
        list(expert_parts(model.layers[0].mlp, mx.float32))


def test_rows_are_routed_by_their_own_numbers() -> None:
    mx.random.seed(1)
    router = Router(mx.random.normal((9, 16)), new_counter(8), correction=mx.random.normal((8,)) * 0.1)
    routing = Routing(8, 2, "sigmoid", normalised=True, scale=2.0)
    x = mx.random.normal((5, 16))
    together = route(x, router, routing)
    assert together.shared is not None and together.shared.shape == (5,), "the ninth row is a gate"
    np.testing.assert_allclose(np.array(together.weights.sum(axis=-1)), 2.0, rtol=1e-5)
    for row in range(5):
        alone = route(x[row : row + 1], router, routing)
        assert sorted(alone.indices[0].tolist()) == sorted(together.indices[row].tolist())
    live = route(x, router, routing, live=mx.array([1, -1, 0, -1, 5]))
    assert [min(row) < 0 for row in live.indices.tolist()] == [False, True, False, True, False]


@pytest.mark.parametrize(
    ("shape", "packing", "taken"),
    [
        ((4, 64, 96), None, True),
        ((4, 48, 96), None, False),
        ((4, 64, 80), None, False),
        ((2000, 32, 32), None, False),
        ((4, 64, 128), Packing(4, 64, "affine"), True),
        ((4, 64, 128), Packing(8, 32, "affine"), True),
        ((4, 64, 128), Packing(4, 32, "mxfp4"), True),
        ((4, 64, 128), Packing(3, 64, "affine"), False),
        ((4, 64, 128), Packing(4, 16, "nvfp4"), False),
    ],
)
def test_what_the_kernels_take(shape: tuple[int, ...], packing: Packing | None, taken: bool) -> None:
    weight = mx.zeros(shape, dtype=mx.bfloat16)
    arrays: tuple[mx.array, ...] = (weight,)
    if packing is not None:
        arrays = tuple(mx.quantize(weight, packing.group_size, packing.bits, packing.mode))
    weights = ExpertWeights(arrays, packing)
    assert (weights.experts, weights.outputs, weights.inputs) == shape
    assert fits(weights, mx.bfloat16) is taken
    assert not fits(weights, mx.float32)


def test_which_routers_the_kernel_takes() -> None:
    router = Router(mx.zeros((64, 96), dtype=mx.bfloat16), new_counter(64))
    assert route_fits(router, Routing(64, 8, "softmax"), mx.bfloat16)
    assert not route_fits(router, Routing(64, 40, "softmax"), mx.bfloat16), "a lane holds one choice"
    assert not route_fits(router, Routing(64, 8, "softmax"), mx.float32)
    odd = Router(mx.zeros((64, 90), dtype=mx.bfloat16), new_counter(64))
    assert not route_fits(odd, Routing(64, 8, "softmax"), mx.bfloat16)
