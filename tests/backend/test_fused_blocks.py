"""Fused transformer blocks against the blocks of mlx-lm that they replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from millstream.backend.generation.caches.class_caches import ClassCaches
from millstream.backend.generation.caches.joining import JoiningRows, joining_row
from millstream.backend.generation.caches.widths import kernel_width, powers_of_two
from millstream.backend.generation.layers.attention import adopt_attention, attention
from millstream.backend.generation.layers.fused_blocks import fuse_blocks, unfuse_blocks
from millstream.backend.kernels.small_matmul import WIDTHS
from millstream.backend.layers.cpu_experts import use_float32_experts
from millstream.backend.layers.cpu_linear import mkl_layer, use_mkl_layout
from millstream.backend.layers.fused_matmul import BY_MLX, BY_MLX_COMPILED, FusedMatmuls
from millstream.backend.layers.projections import fuse_projections, joined_layer, joined_layers
from support.block_families import FORMS, settings
from support.block_families import make as make_model
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
    "RoPE in pairs": {"rope_traditional": True},
    "a bias after attention": {"attention_bias": True},
    "another rotary embedding": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    **{
        name: {**settings(name), "num_hidden_layers": 2} for name in ("phi3", "gemma", "granite", "smollm3", "nemotron")
    },
}
NOT_FUSED: dict[str, dict[str, Any]] = {
    "attention and MLP beside each other": {"model_type": "cohere", "layer_norm_eps": 1e-5},
    "three parts": {"model_type": "falcon_h1", **FAMILIES["falcon_h1"]},
}


def make(changes: dict[str, Any]) -> Any:
    return make_model({"model_type": "llama", **BASE, **changes, "num_hidden_layers": LAYERS})


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
    assert [shape[0] for shape in attend.shapes] == [WIDTHS[0]] * 4 * LAYERS, "the blocks were not used"
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


@pytest.mark.parametrize("family", FORMS)
def test_no_family_loses_its_path(family: str) -> None:
    """A new version of mlx-lm that changes a block must not make it slow without anybody noticing."""
    model = make_model(settings(family))
    adopt_attention(model, attention)
    fuse_projections(model)
    fusion = fuse_blocks(model, BY_MLX, attention)
    assert dict(fusion.forms) == FORMS[family], fusion.note
    assert fusion.refused is None


@pytest.mark.parametrize("changes", NOT_FUSED.values(), ids=NOT_FUSED)
def test_a_block_that_does_something_else_is_left_alone(changes: dict[str, Any]) -> None:
    model = make(changes)
    fuse_projections(model)
    before = [type(block) for block in model.layers]
    fusion = fuse_blocks(model, BY_MLX, attention)
    assert not fusion
    assert fusion.refused is not None and fusion.refused.startswith("layer 0 ")
    assert [type(block) for block in model.layers] == before


def test_projections_that_were_not_joined_are_left_alone() -> None:
    fusion = fuse_blocks(make({}), BY_MLX, attention)
    assert dict(fusion.forms) == {"the projections of self_attn and the projections of mlp": LAYERS}
    assert fusion.refused == "layer 0: self_attn has projections that were not joined"


def test_packed_weights_stay_packed() -> None:
    model = make({})
    nn.quantize(model, group_size=32, bits=4)
    fuse_projections(model)
    assert dict(fuse_blocks(model, BY_MLX, attention).forms) == {"attention and MLP": LAYERS}


def test_unfused_blocks_are_those_of_mlx_lm() -> None:
    model = make({})
    before = [type(block) for block in model.layers]
    fuse_projections(model)
    assert fuse_blocks(model, BY_MLX, attention).blocks == LAYERS
    assert unfuse_blocks(model) == LAYERS
    assert [type(block) for block in model.layers] == before
    assert unfuse_blocks(model) == 0


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


class ExtraStep(llama.TransformerBlock):  # type: ignore[misc]
    """As a new version of mlx-lm might: one more step at the end."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        out: mx.array = super().__call__(x, mask, cache)
        return out + 0.1 * mx.tanh(out)


class OtherScale(llama.Attention):  # type: ignore[misc]
    """Attention that does something more to its output."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        out: mx.array = super().__call__(x, mask, cache)
        return 1.1 * out


class OtherActivation(llama.MLP):  # type: ignore[misc]
    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(mx.tanh(self.gate_proj(x)) * self.up_proj(x))
        return out


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_part_that_gives_other_numbers_is_left_alone(dtype: mx.Dtype) -> None:
    """The rest of its block is fused, and of the part itself what is left to fuse."""
    model = make({})
    model.set_dtype(dtype)
    model.layers[0].self_attn.__class__ = OtherScale
    model.layers[1].mlp.__class__ = OtherActivation
    fuse_projections(model)
    fusion = fuse_blocks(model, BY_MLX, attention)
    assert dict(fusion.forms) == {
        "the projections of self_attn and MLP": 1,
        "attention and the projections of mlp": 1,
    }
    assert fusion.refused is not None and fusion.refused.startswith("layer 0: self_attn differs by ")


@pytest.mark.parametrize("kind", [HalfAsMuch, OtherOrder, ExtraStep])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_block_that_gives_other_numbers_is_left_alone(kind: type, dtype: mx.Dtype) -> None:
    model = make({})
    model.set_dtype(dtype)
    model.layers[1].__class__ = kind
    fuse_projections(model)
    fusion = fuse_blocks(model, BY_MLX, attention)
    assert fusion.blocks == LAYERS - 1
    assert fusion.refused is not None and fusion.refused.startswith("layer 1 differs by ")


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("changes", FUSED.values(), ids=FUSED)
def test_rounding_of_half_precision_is_no_difference(changes: dict[str, Any], dtype: mx.Dtype) -> None:
    model = make(changes)
    model.set_dtype(dtype)
    use_float32_experts(model)
    fuse_projections(model)
    fusion = fuse_blocks(model, BY_MLX, attention)
    assert (fusion.blocks, fusion.attending, fusion.refused) == (LAYERS, LAYERS, None)


def test_a_block_that_adds_next_to_nothing_is_fused() -> None:
    """Rounding of its input is then larger than what it adds."""
    model = make({})
    for layer in model.layers:
        layer.self_attn.o_proj.weight = layer.self_attn.o_proj.weight * 1e-3
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 1e-3
    model.set_dtype(mx.bfloat16)
    fuse_projections(model)
    assert fuse_blocks(model, BY_MLX, attention).blocks == LAYERS


def test_rows_in_caches_of_prompts_take_the_old_way() -> None:
    model = make({})
    adopt_attention(model, attention)
    fuse_projections(model)

    attend = Watched()
    assert fuse_blocks(model, BY_MLX, attend).blocks == LAYERS
    attend.shapes.clear()
    mx.eval(model(mx.zeros((32, 1), dtype=mx.int32), cache=[KVCache() for _ in range(LAYERS)]))
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
    assert [kernel_width(slots) for slots in (0, 1, *WIDTHS, WIDTHS[0] + 1, 65, 128)] == [
        *(0, 1, *WIDTHS, WIDTHS[1]),
        *(128, 128),
    ]
