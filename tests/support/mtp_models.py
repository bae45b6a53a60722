"""Tiny models with heads for multi-token prediction, in folders with the names of published families."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.base import create_attention_mask

from millstream.backend.generation.mtp.families import FAMILIES
from millstream.backend.generation.mtp.head import MtpHead
from millstream.backend.generation.mtp.loading import text_model, vocabulary_of

VOCAB = 64
CACHE = Path(__file__).parents[2] / ".pytest_cache" / "models"


def mtp_config(family: str, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model_type": family,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "mtp_num_hidden_layers": 1,
    }
    return {**base, **_OTHERS.get(family, {}), **changes}


_QWEN: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
_OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_QWEN,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen3_5": {**_QWEN, "rope_parameters": {"type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "glm4_moe": {
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
}


def make_model(config: dict[str, Any]) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    return module.Model(module.ModelArgs.from_dict(config))


def make_head(config: dict[str, Any], model: Any) -> MtpHead:
    """A head as the family's config says it, with random weights, bound to its model."""
    family = FAMILIES[config["model_type"]]
    block = make_model({**config, **family.one_layer}).layers[0]
    head = MtpHead(
        block,
        config["hidden_size"],
        config["rms_norm_eps"],
        has_norm="norm" in family.parts,
        hidden_first=family.hidden_first,
    )
    head.bind(*vocabulary_of(model))
    return head


def randomize(module: Any, seed: int) -> None:
    """Weights that are all different, norms too, and large enough that logits differ clearly."""
    keys = iter(mx.random.split(mx.random.key(seed), 1000))

    def fresh(value: mx.array) -> mx.array:
        noise = mx.random.normal(value.shape, key=next(keys))
        return noise * 0.1 if value.ndim > 1 else value + 0.1 * noise

    module.update(tree_map(fresh, module.parameters()))


def published_names(config: dict[str, Any], model: Any, head: MtpHead) -> dict[str, mx.array]:
    """The weights of both as the family publishes them: experts one by one, norms less one, one layer more."""
    family, layers = FAMILIES[config["model_type"]], config["num_hidden_layers"]
    qwen = config["model_type"].startswith("qwen3")
    weights = {name.removeprefix("language_model."): value for name, value in tree_flatten(model.parameters())}
    for name, value in tree_flatten(head.parameters()):
        part, _, rest = name.partition(".")
        start = family.block if part == "block" else f"{family.parts[part]}."
        weights[start.format(layers=layers) + rest] = value
    found: dict[str, mx.array] = {}
    for name, value in weights.items():
        is_norm = name.endswith("norm.weight") or "pre_fc_norm" in name
        if ".switch_mlp." in name:
            for index in range(value.shape[0]):
                found[name.replace(".switch_mlp.", f".experts.{index}.")] = value[index]
        elif "conv1d.weight" in name:
            found[name] = value.moveaxis(1, 2)
        elif qwen and is_norm and "linear_attn.norm" not in name:
            found[name] = value - 1
        elif name.endswith(".embed_q.weight"):
            other = weights[name.replace("embed_q", "unembed_out")]
            joined = mx.concatenate([value.swapaxes(-1, -2), other], axis=1)
            found[name.replace("embed_q", "kv_b_proj")] = joined.reshape(-1, joined.shape[-1])
        elif not name.endswith(".unembed_out.weight"):
            found[name] = value
    return found


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: mx.contiguous(value) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_published(folder: Path, family: str, **changes: Any) -> Path:
    """A random model of a family with a head, in the family's own layout."""
    config = mtp_config(family, **changes)
    model = make_model(config)
    head = make_head(config, model)
    randomize(model, 1)
    randomize(head, 2)
    return write_folder(folder, config, published_names(config, model, head))


def sentences(seed: int, count: int, length: int) -> list[list[int]]:
    """Made-up text: words of several letters, in an order that depends on the word before, with some chance in it."""
    draw = random.Random(99)
    words = [[draw.randrange(VOCAB) for _ in range(draw.randrange(3, 7))] for _ in range(24)]
    follow = [[draw.randrange(24) for _ in range(4)] for _ in range(24)]
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        word, text = draw.randrange(24), []
        while len(text) < length:
            text += words[word]
            word = draw.choice(follow[word]) if draw.random() < 0.5 else follow[word][0]
        found.append(text[:length])
    return found


def train(config: dict[str, Any], steps: int, *, batch: int = 16, length: int = 64) -> tuple[Any, MtpHead]:
    """A model and its head, trained together on `sentences`: the head learns to predict the token after next."""
    mx.random.seed(7)
    model = make_model(config)
    head = make_head(config, model)
    inner, (_, output) = text_model(model), vocabulary_of(model)
    family = FAMILIES[config["model_type"]]
    pair = nn.Module()
    pair.model, pair.head = model, head
    norm = inner.norm

    def loss(pair: nn.Module, tokens: mx.array) -> mx.array:
        kept: list[mx.array] = []

        class Keep(nn.Module):
            def __call__(self, x: mx.array) -> mx.array:
                out = norm(x)
                kept.append(out if family.after_norm else x)
                return out

        inner.norm = Keep()
        try:
            logits = model(tokens[:, :-1])
        finally:
            inner.norm = norm
        next_loss = nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")
        hidden = mx.stop_gradient(kept[0][:, :-1])
        mask = create_attention_mask(hidden, None)
        drafted = output(head(tokens[:, 1:-1], hidden, mask, None))
        return next_loss + nn.losses.cross_entropy(drafted, tokens[:, 2:], reduction="mean")

    optimizer = optim.Adam(learning_rate=3e-3)
    step = nn.value_and_grad(pair, loss)
    for number in range(steps):
        value, grads = step(pair, mx.array(sentences(number, batch, length)))
        optimizer.update(pair, grads)
        mx.eval(pair.parameters(), optimizer.state, value)
    return model, head


def trained_folder(cache: Path = CACHE) -> Path:
    """A trained model with a head, in MiMo's layout; made once for this version of this file."""
    text = Path(__file__).read_bytes() + importlib.metadata.version("mlx").encode()
    folder = cache / f"mtp-{hashlib.sha256(text).hexdigest()[:16]}"
    if not folder.exists():
        config = mtp_config("mimo", hidden_size=32, intermediate_size=64)
        model, head = train(config, 120, batch=8, length=32)
        cache.mkdir(parents=True, exist_ok=True)
        made = write_folder(Path(tempfile.mkdtemp(dir=cache)), config, published_names(config, model, head))
        try:
            made.rename(folder)
        except OSError:  # another worker was faster
            shutil.rmtree(made)
    return folder
