"""Heads for multi-token prediction as published families store them: loaded as they are, packed, or missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask

from millstream.backend.generation.mtp.families import FAMILIES
from millstream.backend.generation.mtp.loading import FoundHead, load_head, text_model, vocabulary_of
from support.mtp_models import (
    VOCAB,
    make_head,
    make_model,
    mtp_config,
    published_names,
    randomize,
    write_folder,
)

LAYOUTS = ["mimo", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5", "ernie4_5_moe"]


def random_pair(family: str) -> tuple[dict[str, Any], Any, Any]:
    config = mtp_config(family)
    model = make_model(config)
    head = make_head(config, model)
    randomize(model, 1)
    randomize(head, 2)
    return config, model, head


def load(folder: Path) -> FoundHead:
    return load_head(folder, json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("family", LAYOUTS)
def test_a_published_layout_is_loaded(family: str, tmp_path: Path) -> None:
    """Each weight arrives where it belongs: the loaded head computes what the one that was stored computes."""
    config, model, head = random_pair(family)
    found = load(write_folder(tmp_path / family, config, published_names(config, model, head)))
    assert found.head is not None, found.note
    found.head.bind(*vocabulary_of(model))
    tokens = mx.array([[3, 1, 4, 1, 5]])
    hidden = mx.random.normal((1, 5, config["hidden_size"]), key=mx.random.key(5))
    mask = create_attention_mask(hidden, None, return_array=True)
    expected = head.logits(head(tokens, hidden, mask, None))
    assert mx.array_equal(found.head.logits(found.head(tokens, hidden, mask, None)), expected)
    own = dict(tree_flatten(found.head.parameters()))
    assert own.keys() == dict(tree_flatten(head.parameters())).keys()


def test_what_a_head_reads_differs_by_family() -> None:
    """The hidden state after the last norm, but for MiMo, which also puts it before the embedding."""
    assert [name for name, family in FAMILIES.items() if not family.after_norm] == ["mimo"]
    assert [name for name, family in FAMILIES.items() if family.hidden_first] == ["mimo"]


def test_an_order_of_the_pair_counts() -> None:
    """A head that reads the pair in the other order gives something else."""
    _, _, head = random_pair("mimo")
    tokens, hidden = mx.array([[3]]), mx.random.normal((1, 1, 64), key=mx.random.key(5))
    one = head(tokens, hidden, None, None)
    head._hidden_first = not head._hidden_first
    assert not mx.allclose(one, head(tokens, hidden, None, None), atol=1e-2)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5"])
def test_packed_heads(family: str, bits: int, tmp_path: Path) -> None:
    """A folder in the library's own form: experts stacked, norms as they are, linear layers packed."""
    config, model, head = random_pair(family)
    nn.quantize(head, group_size=32, bits=bits)
    names, layers = FAMILIES[family], config["num_hidden_layers"]
    weights = {name.removeprefix("language_model."): value for name, value in tree_flatten(model.parameters())}
    for name, value in tree_flatten(head.parameters()):
        part, _, rest = name.partition(".")
        start = names.block if part == "block" else f"{names.parts[part]}."
        weights[start.format(layers=layers) + rest] = value
    config["quantization"] = {"group_size": 64, "bits": 4}  # the head's own weights say what they are
    found = load(write_folder(tmp_path / family, config, weights))
    assert found.head is not None, found.note
    expected = dict(tree_flatten(head.parameters()))
    got = dict(tree_flatten(found.head.parameters()))
    assert got.keys() == expected.keys() and any(name.endswith(".scales") for name in got)
    assert all(mx.array_equal(got[name], expected[name]) for name in expected)


def test_copies_of_the_vocabulary_are_not_loaded_twice(tmp_path: Path) -> None:
    """DeepSeek's layout stores the target's embedding and output layer again; a head may also have its own."""
    config, model, head = random_pair("glm4_moe")
    weights = published_names(config, model, head)
    extra = f"model.layers.{config['num_hidden_layers']}"
    weights[f"{extra}.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    weights[f"{extra}.shared_head.head.weight"] = mx.random.normal((VOCAB, 64), key=mx.random.key(3))
    found = load(write_folder(tmp_path / "glm", config, weights))
    assert found.head is not None and found.head.embedding is None
    assert mx.array_equal(found.head.output.weight, weights[f"{extra}.shared_head.head.weight"])


def test_a_copy_without_heads_says_so(tmp_path: Path) -> None:
    config, model, head = random_pair("glm4_moe")
    weights = {
        name: value
        for name, value in published_names(config, model, head).items()
        if not name.startswith("model.layers.2.")
    }
    assert load(write_folder(tmp_path / "a", config, weights)).note == "this copy has no MTP weights"
    without = write_folder(tmp_path / "b", {**config, "num_nextn_predict_layers": 0}, weights)
    assert load(without) == FoundHead()


def test_a_damaged_head_is_left_out(tmp_path: Path) -> None:
    config, model, head = random_pair("glm4_moe")
    weights = published_names(config, model, head)
    shorter = {name: value for name, value in weights.items() if not name.endswith("hnorm.weight")}
    found = load(write_folder(tmp_path / "a", config, shorter))
    assert found.head is None and found.note == "MTP weights are not used: 'hidden_norm.weight' is missing"
    name = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    found = load(write_folder(tmp_path / "b", config, {**weights, name: weights[name][:, :64]}))
    assert found.head is None and "has the shape (64, 64); it must be (64, 128)" in found.note


def test_a_family_that_is_not_known_says_so(tmp_path: Path) -> None:
    config, model, _ = random_pair("mimo")
    weights = {**dict(tree_flatten(model.parameters())), "mtp.layers.0.thing.weight": mx.zeros((2,))}
    found = load(write_folder(tmp_path / "a", {**config, "model_type": "nemotron_h"}, weights))
    assert found.head is None and found.note == "MTP weights are not used: not for nemotron_h yet"


def test_the_target_is_found_in_wrapped_models() -> None:
    _, model, _ = random_pair("qwen3_5")
    assert text_model(model) is model.language_model.model
