"""Models loaded from GGUF files give what the models they were written from give."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map_with_path

from millstream.backend.weights.gguf import load_gguf_model, load_gguf_weights
from millstream.errors import ModelError
from millstream.models.gguf_blocks import REPACKED, repack
from millstream.models.gguf_file import open_gguf

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 80,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
LONG = [1.0 + 0.5 * i for i in range(6)]
GEMMA = {"num_hidden_layers": 7, "sliding_window": 6, "query_pre_attn_scalar": 16, "rope_theta": 1e6}
PHI_LONG = {
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "rope_scaling": {"type": "longrope", "long_factor": LONG, "short_factor": [1.0] * 6},
}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"rope_traditional": False}),
    "llama untied": ("llama", "llama", {"tie_word_embeddings": False}),
    "llama 3.1": ("llama", "llama", {"rope_scaling": LLAMA3}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}),
    "qwen3 experts": ("qwen3moe", "qwen3_moe", MOE),
    "gemma3": ("gemma3", "gemma3_text", GEMMA),
    "phi3": ("phi3", "phi3", {"tie_word_embeddings": False}),
    "phi3 long": ("phi3", "phi3", PHI_LONG),
}


def make(model_type: str, own: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An mlx-lm model with random weights, and its configuration."""
    config = CONFIG | {"model_type": model_type} | own
    module = import_module(f"mlx_lm.models.{model_type}")
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(3)
    if model_type == "gemma3_text":
        model.sanitize({})

    def fill(name: str, old: mx.array) -> mx.array:
        centre = 1.0 if "norm" in name and model_type != "gemma3_text" else 0.0
        return mx.random.normal(old.shape) * 0.15 + centre

    model.update(tree_map_with_path(fill, model.parameters()))
    return model, config


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that llama.cpp's converter gives to q and k."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def tensors_of(model: Any, architecture: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The parameters by their GGUF names, which the gguf package's own table gives, and as a converter writes them."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors = {}
    for name, value in tree_flatten(model.parameters()):
        target = names.get_name(name.replace("switch_mlp", "experts"), try_suffixes=(".weight", ".bias"))
        array = np.array(value)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            array = permuted(array, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        tensors[target] = array
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(config["head_dim"], config["rope_theta"], scaling)
    for length in ("long", "short"):
        if f"{length}_factor" in scaling:
            tensors[f"rope_factors_{length}.weight"] = np.array(scaling[f"{length}_factor"], np.float32)
    return tensors


def llama3_factors(dims: int, base: float, scaling: dict[str, Any]) -> np.ndarray:
    factors = []
    for i in range(0, dims, 2):
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * base ** (i / dims))
        low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def write(
    path: Path, architecture: str, config: dict[str, Any], tensors: dict[str, np.ndarray], kinds: dict[str, Kind]
) -> Path:
    """A GGUF file of these tensors; `kinds` are those of tensors that come as bytes."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]:
        writer.add_key_length(config["head_dim"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "partial_rotary_factor" in config:
        writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kinds.get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_model_it_was_written_from(tmp_path: Path, case: str) -> None:
    architecture, model_type, own = CASES[case]
    model, config = make(model_type, own)
    path = write(tmp_path / "tiny.gguf", architecture, config, tensors_of(model, architecture, config), {})
    loaded, found = load_gguf_model(path, dtype=mx.float32, native_quantisation=True)
    assert found["model_type"] == model_type
    prompt = mx.array([list(range(3, 43))])
    wanted, got = model(prompt), loaded(prompt)
    assert wanted.std().item() > 0.1
    assert mx.abs(wanted - got).max().item() < 1e-3


MIXED = {
    "token_embd.weight": Kind.Q8_0,
    "blk.0.attn_q.weight": Kind.Q4_0,
    "blk.0.attn_k.weight": Kind.Q4_1,
    "blk.0.attn_v.weight": Kind.Q5_0,
    "blk.0.attn_output.weight": Kind.Q5_1,
    "blk.0.ffn_gate.weight": Kind.F16,
    "blk.0.ffn_up.weight": Kind.BF16,
}
WIDE = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with a tensor of each type; those that the gguf package cannot make are random blocks."""
    model, config = make("llama", WIDE)
    tensors = tensors_of(model, "llama", config)
    for name, kind in MIXED.items():
        tensors[name] = gguf.quants.quantize(tensors[name], kind)
    tensors["blk.0.ffn_down.weight"] = random_blocks("Q6_K", 256, np.random.default_rng(1)).reshape(256, -1)
    kinds = MIXED | {"blk.0.ffn_down.weight": Kind.Q6_K}
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    return write(path, "llama", config, tensors, {name: kind for name, kind in kinds.items() if kind != Kind.F16})


def test_every_type_has_its_values_unpacked(mixed: Path) -> None:
    file = open_gguf(mixed)
    weights = load_gguf_weights(file, dtype=mx.float32, native_quantisation=False)
    for name, parameter in (("token_embd", "model.embed_tokens"), ("blk.0.ffn_down", "model.layers.0.mlp.down_proj")):
        assert np.array_equal(np.array(weights[f"{parameter}.weight"]), file.tensors[f"{name}.weight"].floats())
    assert not [name for name in weights if name.endswith(".scales")]
    found = sorted(np.array(value).astype(np.float64).sum() for value in weights.values())
    assert np.allclose(found, sorted(tensor.floats().astype(np.float64).sum() for tensor in file.tensors.values()))


def test_kept_quantised_the_model_says_the_same(mixed: Path) -> None:
    prompt = mx.array([list(range(20))])
    plain, _ = load_gguf_model(mixed, dtype=mx.float32, native_quantisation=False)
    kept, _ = load_gguf_model(mixed, dtype=mx.float32, native_quantisation=True)
    bits = {path: module.bits for path, module in kept.named_modules() if "Quantized" in type(module).__name__}
    attention = "model.layers.0.self_attn"
    assert bits == {
        "model.embed_tokens": 8,
        f"{attention}.q_proj": 4,
        f"{attention}.k_proj": 4,
        f"{attention}.v_proj": 5,
        f"{attention}.o_proj": 5,
    }
    assert mx.abs(plain(prompt) - kept(prompt)).max().item() < 1e-3


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_every_float_gets_the_wanted_type(mixed: Path, dtype: mx.Dtype) -> None:
    file = open_gguf(mixed)
    for native in (True, False):
        weights = load_gguf_weights(file, dtype=dtype, native_quantisation=native)
        assert {value.dtype for value in weights.values()} == ({dtype, mx.uint32} if native else {dtype})


def random_blocks(kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks of random bits, but with scales that are ordinary numbers."""
    size = GGML_QUANT_SIZES[Kind[kind]][1]
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    at = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}.get(kind, (0,))
    for start in at:
        blocks[:, start : start + 2] = rng.normal(0, 0.01, (count, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", sorted(REPACKED))
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 5), across=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_repacking_changes_no_value(kind: str, rows: int, across: int, seed: int) -> None:
    width = across * GGML_QUANT_SIZES[Kind[kind]][0]
    data = random_blocks(kind, rows * across, np.random.default_rng(seed)).reshape(rows, -1)
    packed = repack(kind, (rows, width), data)
    arrays = (mx.array(packed.words), mx.array(packed.scales), mx.array(packed.biases))
    got = np.array(mx.dequantize(*arrays, group_size=32, bits=packed.bits))
    wanted = gguf.quants.dequantize(data, Kind[kind])
    assert got.shape == wanted.shape
    assert np.allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_tensor_that_the_model_has_not_is_named(tmp_path: Path) -> None:
    model, config = make("llama", {})
    tensors = tensors_of(model, "llama", config) | {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = write(tmp_path / "odd.gguf", "llama", config, tensors, {})
    with pytest.raises(ModelError, match=r"odd\.gguf: tensor 'blk\.0\.attn_sinks\.weight' is not known"):
        load_gguf_model(path)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    model, config = make("llama", {})
    tensors = tensors_of(model, "llama", config)
    del tensors["blk.1.ffn_up.weight"]
    path = write(tmp_path / "lacking.gguf", "llama", config, tensors, {})
    with pytest.raises(ModelError, match=r"lacking\.gguf: the tensors do not fit.*layers\.1\.mlp\.up_proj"):
        load_gguf_model(path)
