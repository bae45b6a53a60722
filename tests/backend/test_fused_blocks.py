"""Fused transformer blocks against the blocks of mlx-lm that they replace."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from millstream.backend.generation.caches.class_caches import ClassCaches
from millstream.backend.generation.caches.joining import JoiningRows, joining_row
from millstream.backend.generation.caches.widths import kernel_width, powers_of_two
from millstream.backend.generation.layers.attention import adopt_attention, attention
from millstream.backend.generation.layers.fused_blocks import Fusion, fuse_blocks
from millstream.backend.layers.cpu_linear import mkl_layer, use_mkl_layout
from millstream.backend.layers.fused_matmul import BY_MLX, BY_MLX_COMPILED, FusedMatmuls
from millstream.backend.layers.projections import fuse_projections, joined_layer, joined_layers
from support.tiny import BASE, FAMILIES, VOCAB

LAYERS = 2
FUSED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, other heads": {"head_dim": 32, "num_key_value_heads": 4},
    "llama 3": {"rope_scaling": FAMILIES["llama"]["rope_scaling"]},
    "llama, scaled RoPE": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "a bias in the MLP": {"mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3 with experts": {"model_type": "qwen3_moe", **FAMILIES["qwen3_moe"]},
}
NOT_FUSED: dict[str, dict[str, Any]] = {
    "RoPE in pairs": {"rope_traditional": True},
    "a bias after attention": {"attention_bias": True},
    "other norms": {"model_type": "gemma"},
    "other blocks": {"model_type": "gemma2"},
    "another rotary embedding": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    "residual multipliers": {
        "model_type": "granite",
        **dict.fromkeys(("logits_scaling", "attention_multiplier", "embedding_multiplier"), 0.5),
        "residual_multiplier": 0.22,
        "attention_bias": False,
        "mlp_bias": False,
    },
}


def make(changes: dict[str, Any]) -> Any:
    """The same numbers whenever it is called with the same changes; biases and norms are not as they begin."""
    config = {"model_type": "llama", **BASE, **changes, "num_hidden_layers": LAYERS}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(4)
    model.update(tree_map(lambda value: mx.random.normal(value.shape) * 0.2 + (value.ndim == 1), model.parameters()))
    mx.eval(model.parameters())
    return model


def read(model: Any, prompt: list[int]) -> JoiningRows:
    """All but the last token, into caches of its own."""
    caches = [KVCache() for _ in range(LAYERS)]
    if len(prompt) > 1:
        model(mx.array([prompt[:-1]]), cache=caches)
    return joining_row(caches)


def steps(model: Any, prompts: list[list[int]], width: Callable[[int], int]) -> list[mx.array]:
    """The logits of a few steps of rows of unequal length."""
    caches = ClassCaches(read(model, [1, 2]).layers, powers_of_two, width=width)
    assert caches.join([read(model, prompt) for prompt in prompts]) == list(range(len(prompts)))
    tokens = mx.array([*(prompt[-1] for prompt in prompts), *[0] * (caches.size - len(prompts))])
    logits = []
    for _ in range(4):
        caches.begin_step()
        out = model(tokens[:, None], cache=caches.layers)[:, -1]
        caches.end_step()
        tokens = mx.argmax(out, axis=-1)
        logits.append(out[: len(prompts)])
    return logits


class Watched:
    """Attention, and the queries that it was asked for."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, queries: mx.array, *args: Any, **more: Any) -> mx.array:
        self.shapes.append(queries.shape)
        return attention(queries, *args, **more)


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]


@pytest.mark.parametrize("mkl", [False, True])
@pytest.mark.parametrize("changes", FUSED.values(), ids=FUSED)
def test_a_fused_block_gives_what_the_block_gave(changes: dict[str, Any], mkl: bool) -> None:
    plain, ours = make(changes), make(changes)
    for model in (plain, ours):
        assert adopt_attention(model, attention) == LAYERS
    fuse_projections(ours, mkl_layer if mkl else lambda layer: layer)
    if mkl:
        use_mkl_layout(ours)
    attend = Watched()
    assert fuse_blocks(ours, BY_MLX, attend).blocks == LAYERS
    attend.shapes.clear()
    expected = steps(plain, PROMPTS, lambda numbers: numbers)
    got = steps(ours, PROMPTS, kernel_width)
    assert [shape[0] for shape in attend.shapes] == [kernel_width(len(PROMPTS))] * 4 * LAYERS, (
        "the blocks were not used"
    )
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("matmuls", [BY_MLX, BY_MLX_COMPILED], ids=["as it stands", "compiled"])
@pytest.mark.parametrize("changes", FUSED.values(), ids=FUSED)
def test_chunks_of_a_prompt_give_what_they_gave(changes: dict[str, Any], matmuls: FusedMatmuls) -> None:
    plain, ours = make(changes), make(changes)
    fuse_projections(ours)
    attend = Watched()
    assert fuse_blocks(ours, matmuls, attend).blocks == LAYERS
    attend.shapes.clear()
    prompt = [number * 7 % VOCAB for number in range(150)]
    logits = []
    for model in (plain, ours):
        caches = [KVCache() for _ in range(LAYERS)]
        chunks = [model(mx.array([prompt[start:end]]), cache=caches) for start, end in ((0, 64), (64, 128), (128, 150))]
        logits.append(mx.concatenate(chunks, axis=1))
    assert [shape[2] for shape in attend.shapes] == [64] * 2 * LAYERS, "the blocks were not used"
    np.testing.assert_allclose(np.array(logits[1]), np.array(logits[0]), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("changes", NOT_FUSED.values(), ids=NOT_FUSED)
def test_a_block_that_does_something_else_is_left_alone(changes: dict[str, Any]) -> None:
    model = make(changes)
    fuse_projections(model)
    fusion = fuse_blocks(model, BY_MLX, attention)
    assert not fusion
    assert fusion.refused is not None and fusion.refused.startswith("model.layers.0 has ")


def test_projections_that_were_not_joined_or_are_packed_are_left_alone() -> None:
    assert fuse_blocks(make({}), BY_MLX, attention).refused == "model.layers.0 has projections that were not joined"
    packed = make({})
    nn.quantize(packed, group_size=32, bits=4)
    fuse_projections(packed)
    assert (
        fuse_blocks(packed, BY_MLX, attention).refused == "model.layers.0 has projections that the matmuls do not take"
    )


class HalfAsMuch(llama.TransformerBlock):  # type: ignore[misc]
    """Names the same steps as Llama's block, and adds half of what they give."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h = x + 0.5 * self.self_attn(self.input_layernorm(x), mask, cache)
        out: mx.array = h + 0.5 * self.mlp(self.post_attention_layernorm(h))
        return out


class OtherOrder(llama.TransformerBlock):  # type: ignore[misc]
    """The MLP reads the input of the block, not what attention made of it."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h = x + self.self_attn(self.input_layernorm(x), mask, cache)
        out: mx.array = h + self.mlp(self.post_attention_layernorm(x))
        return out


@pytest.mark.parametrize("kind", [HalfAsMuch, OtherOrder])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_block_that_gives_other_numbers_is_left_alone(kind: type, dtype: mx.Dtype) -> None:
    model = make({})
    model.set_dtype(dtype)
    model.layers[1].__class__ = kind
    fuse_projections(model)
    fusion = fuse_blocks(model, BY_MLX, attention)
    assert fusion.blocks == LAYERS - 1
    assert fusion.refused is not None and fusion.refused.startswith("model.layers.1 differs by ")


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("changes", FUSED.values(), ids=FUSED)
def test_rounding_of_half_precision_is_no_difference(changes: dict[str, Any], dtype: mx.Dtype) -> None:
    model = make(changes)
    model.set_dtype(dtype)
    fuse_projections(model)
    assert fuse_blocks(model, BY_MLX, attention) == Fusion(LAYERS)


def test_a_block_that_adds_next_to_nothing_is_fused() -> None:
    """Rounding of its input is then larger than what it adds."""
    model = make({})
    for layer in model.layers:
        layer.self_attn.o_proj.weight = layer.self_attn.o_proj.weight * 1e-3
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 1e-3
    model.set_dtype(mx.bfloat16)
    fuse_projections(model)
    assert fuse_blocks(model, BY_MLX, attention).blocks == LAYERS


def test_prompts_and_other_types_take_the_old_way() -> None:
    model = make({})
    adopt_attention(model, attention)
    fuse_projections(model)

    attend = Watched()
    assert fuse_blocks(model, BY_MLX, attend).blocks == LAYERS
    attend.shapes.clear()
    mx.eval(model(mx.zeros((32, 1), dtype=mx.int32), cache=[KVCache() for _ in range(LAYERS)]))
    caches = ClassCaches(read(model, [1, 2]).layers, powers_of_two, width=kernel_width)
    caches.join([read(model, prompt) for prompt in PROMPTS])
    caches.begin_step()
    mx.eval(
        model.model.layers[0](mx.ones((kernel_width(len(PROMPTS)), 1, 64), dtype=mx.bfloat16), None, caches.layers[0])
    )
    assert attend.shapes == []


def test_joined_layers_are_found_once() -> None:
    model = make({})
    assert joined_layers(model) == []
    fuse_projections(model)
    assert len(joined_layers(model)) == 2 * LAYERS
    attention_layer = model.model.layers[0].self_attn
    assert joined_layer(attention_layer, ("q_proj", "k_proj", "v_proj")).weight.shape == (128, 64)
    assert joined_layer(attention_layer, ("q_proj", "o_proj")) is None
    assert joined_layer(attention_layer, ("q_proj", "nothing")) is None


def test_widths() -> None:
    assert [kernel_width(slots) for slots in (0, 1, 8, 32, 33, 64, 65, 128)] == [0, 8, 8, 32, 64, 64, 65, 128]
