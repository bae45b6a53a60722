"""Each family of encoders against an independent one in NumPy; a batch of mixed lengths equals each input alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from millstream.backend.encoders.families.bert import relative_bias
from support import numpy_encoders
from support.encodes import encode_alone_and_together, encoder_engine, requested, vectors_of
from support.numpy_encoders import Array, Weights, unit
from support.tiny_encoders import OWN, VOCAB, write_encoder

LENGTHS = (1, 3, 17, 9, 100, 64, 2)
PREFIXES = ("bert.", "roberta.", "electra.", "mpnet.", "distilbert.", "model.")
CLOSE = 1e-5
BATCHED = 3e-6


def inputs(seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(2, VOCAB, length).tolist() for length in LENGTHS]


def reference(family: str) -> Callable[..., Array]:
    own: dict[str, Callable[..., Array]] = {
        "distilbert": numpy_encoders.distilbert,
        "modernbert": numpy_encoders.modernbert,
        "nomic_bert": numpy_encoders.nomic_bert,
    }
    return own.get(family, numpy_encoders.bert)


def read(folder: Path) -> tuple[dict[str, Any], Weights]:
    return json.loads((folder / "config.json").read_text()), Weights(load_file(folder / "model.safetensors"), *PREFIXES)


@pytest.mark.parametrize("family", OWN)
def test_hidden_states_equal_an_independent_computation(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, family)
    config, weights = read(folder)
    expected = [unit(reference(family)(config, weights, each).mean(0)) for each in inputs()]
    with encoder_engine(folder, pad_token=1) as driver:
        alone, together = encode_alone_and_together(driver, inputs())
    np.testing.assert_allclose(alone, expected, atol=CLOSE)
    np.testing.assert_allclose(together, alone, atol=BATCHED)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_language_models_batched_equal_alone(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, family, pooling="lasttoken" if family == "qwen3" else "mean")
    with encoder_engine(folder) as driver:
        alone, together = encode_alone_and_together(driver, inputs())
    np.testing.assert_allclose(together, alone, atol=BATCHED)


CLASSIFIERS: dict[str, Callable[[Weights, Array], Any]] = {
    "bert": lambda w, h: w.linear(np.tanh(w.linear(h[0], "pooler.dense")), "classifier"),
    "distilbert": lambda w, h: w.linear(np.maximum(w.linear(h[0], "pre_classifier"), 0), "classifier"),
    "electra": lambda w, h: w.linear(numpy_encoders.gelu(w.linear(h[0], "classifier.dense")), "classifier.out_proj"),
    "modernbert": lambda w, h: w.linear(
        w.norm(numpy_encoders.gelu(w.linear(h[0], "head.dense")), "head.norm", 1e-5), "classifier"
    ),
}


def _roberta(w: Weights, h: Array) -> Any:
    return w.linear(np.tanh(w.linear(h[0], "classifier.dense")), "classifier.out_proj")


@pytest.mark.parametrize("family", [family for family in OWN if family != "nomic_bert"])
def test_scores_equal_an_independent_computation(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, family, reranker=True)
    config, weights = read(folder)
    head = CLASSIFIERS.get(family, _roberta)
    pairs = inputs()
    firsts = [(len(each) + 1) // 2 if family == "bert" else len(each) for each in pairs]
    expected = []
    for each, first in zip(pairs, firsts, strict=True):
        second = [[int(place >= first) for place in range(len(each))]] if family == "bert" else []
        hidden = reference(family)(config, weights, each, *second)
        expected.append(numpy_encoders.sigmoid(head(weights, hidden)))
    with encoder_engine(folder, pad_token=1) as driver:
        alone, together = encode_alone_and_together(driver, pairs, firsts)
    np.testing.assert_allclose(alone, expected, atol=CLOSE)
    np.testing.assert_allclose(together, alone, atol=BATCHED)


def test_modernbert_can_classify_by_the_mean(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "modernbert", reranker=True, classifier_pooling="mean")
    config, weights = read(folder)
    with encoder_engine(folder) as driver:
        _, together = encode_alone_and_together(driver, inputs())
    hidden = [reference("modernbert")(config, weights, each).mean(0, keepdims=True) for each in inputs()]
    expected = [numpy_encoders.sigmoid(CLASSIFIERS["modernbert"](weights, each)) for each in hidden]
    np.testing.assert_allclose(together, expected, atol=CLOSE)


@pytest.mark.parametrize("pooling", ["cls", "lasttoken", "max"])
def test_other_poolings(pooling: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert", pooling=pooling)
    config, weights = read(folder)
    pooled: dict[str, Callable[[Array], Array]] = {
        "cls": lambda hidden: hidden[0],
        "lasttoken": lambda hidden: hidden[-1],
        "max": lambda hidden: hidden.max(0),
    }
    expected = [unit(pooled[pooling](numpy_encoders.bert(config, weights, each))) for each in inputs()]
    with encoder_engine(folder) as driver:
        _, together = encode_alone_and_together(driver, inputs())
    np.testing.assert_allclose(together, expected, atol=CLOSE)


def test_dense_layers_follow_the_pooling(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert")
    modules = json.loads((folder / "modules.json").read_text())
    dense = {"idx": 9, "name": "9", "path": "9_Dense", "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps([*modules[:2], dense, modules[2]]))
    (folder / "9_Dense").mkdir()
    (folder / "9_Dense" / "config.json").write_text(
        json.dumps({"activation_function": "torch.nn.modules.activation.Tanh"})
    )
    layer = np.random.default_rng(1).normal(size=(5, 32)).astype(np.float32)
    save_file({"linear.weight": layer, "linear.bias": layer[:, 0].copy()}, folder / "9_Dense" / "model.safetensors")
    config, weights = read(folder)
    pooled = [numpy_encoders.bert(config, weights, each).mean(0) for each in inputs()]
    expected = [unit(np.tanh(layer @ each + layer[:, 0])) for each in pooled]
    with encoder_engine(folder) as driver:
        assert driver.facts is not None and driver.facts.width == 5  # type: ignore[attr-defined]
        _, together = encode_alone_and_together(driver, inputs())
    np.testing.assert_allclose(together, expected, atol=CLOSE)


def test_relative_positions_have_their_buckets_at_every_distance() -> None:
    table = np.arange(32, dtype=np.float32)[:, None]
    ours = np.asarray(relative_bias(mx.array(table), 300))[0]
    expected = numpy_encoders._mpnet_bias(Weights({"encoder.relative_attention_bias.weight": table}), 300)
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(("family", "reach"), [("modernbert", 4), ("gemma3_text", 8)])
def test_windows_end_where_they_should(family: str, reach: int, tmp_path: Path) -> None:
    """With local layers only, one layer deep: the first token sees `reach` tokens ahead and no more."""
    changes: dict[str, Any] = {"num_hidden_layers": 1, "sliding_window_pattern": 2}
    if family == "modernbert":
        changes |= {"layer_types": ["sliding_attention"]}
    folder = write_encoder(tmp_path, family, pooling="cls", **changes)
    tokens = inputs()[4][:40]

    def changed(place: int) -> list[int]:
        return [*tokens[:place], (tokens[place] + 1) % VOCAB, *tokens[place + 1 :]]

    with encoder_engine(folder) as driver:
        driver.complete(requested(1, [tokens, changed(reach), changed(reach + 1)]))
        base, within, beyond = vectors_of(driver, 1)
    assert np.abs(base - within).max() > 1e-4
    np.testing.assert_allclose(base, beyond, atol=1e-6)


def test_an_instruction_that_all_inputs_share_is_read_once_and_changes_nothing(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "qwen3", pooling="lasttoken")
    shared = inputs()[5]
    texts = [[*shared, *each] for each in inputs(seed=1)]
    with encoder_engine(folder) as driver:
        alone, together = encode_alone_and_together(driver, texts)
        again = encode_alone_and_together(driver, texts[::-1])[1][::-1]
        others = encode_alone_and_together(driver, inputs())
        driver.reset()
        driver.complete(requested(1, [shared, shared]))
        same = vectors_of(driver, 1)
    np.testing.assert_allclose(together, alone, atol=BATCHED)
    np.testing.assert_allclose(again, alone, atol=BATCHED)
    np.testing.assert_allclose(others[1], others[0], atol=BATCHED)
    np.testing.assert_allclose(same[0], same[1], atol=1e-7)


def test_yes_and_no_of_a_language_model(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "Qwen3-Reranker-tiny", "qwen3", reranker=True)
    for name in ("modules.json",):
        assert not (folder / name).exists()
    no, yes = 5, 6
    embedder = write_encoder(tmp_path / "embedder", "qwen3", pooling="lasttoken")
    modules = json.loads((embedder / "modules.json").read_text())
    (embedder / "modules.json").write_text(json.dumps(modules[:2]))  # not normalised
    with encoder_engine(embedder) as driver:
        hidden, _ = encode_alone_and_together(driver, inputs())
    rows = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    expected = numpy_encoders.sigmoid(hidden @ rows[yes] - hidden @ rows[no])
    _with_language_model_names(folder)
    with encoder_engine(folder, answers=(no, yes)) as driver:
        alone, together = encode_alone_and_together(driver, inputs())
    np.testing.assert_allclose(alone[:, 0], expected, atol=CLOSE)
    np.testing.assert_allclose(together, alone, atol=BATCHED)


def _with_language_model_names(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_the_names_of_published_files_may_have_a_prefix_or_a_head(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, family)
    with encoder_engine(folder) as driver:
        _, plain = encode_alone_and_together(driver, inputs())
    tensors = load_file(folder / "model.safetensors")
    prefix = "bert." if family == "bert" else "model."
    renamed = {f"{prefix}{_old(name)}": tensor for name, tensor in tensors.items()}
    extra = {"lm_head.weight" if family == "qwen3" else "cls.predictions.bias": np.ones((VOCAB, 32), np.float32)}
    save_file({**renamed, **extra}, folder / "model.safetensors")
    with encoder_engine(folder) as driver:
        _, named = encode_alone_and_together(driver, inputs())
    np.testing.assert_array_equal(named, plain)


def _old(name: str) -> str:
    """BERT's first release had other names for LayerNorms."""
    if "LayerNorm" not in name:
        return name
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert")
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors")
    with (
        pytest.raises(AssertionError, match=r"no tensor 'encoder\.layer\.1\.output\.dense\.weight'"),
        encoder_engine(folder),
    ):
        pass


def test_an_activation_that_is_not_supported_is_named(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert", hidden_act="swirl")
    with (
        pytest.raises(AssertionError, match="activation 'swirl' is not supported; supported: gelu"),
        encoder_engine(folder),
    ):
        pass


def _mlx_vlm(folder: Path, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> list[Any]:
    """By mlx-vlm's own modules, one input at a time."""
    from mlx_vlm.embedding_loader import load_embedding_model
    from mlx_vlm.models.pooling import read_pooling_config
    from mlx_vlm.reranker_loader import load_sequence_classification_model

    results = []
    if types is None:
        model = load_embedding_model(folder)
        model.pooling_config = read_pooling_config(folder)
        for each in texts:
            results.append(np.asarray(model(mx.array([each]), attention_mask=mx.ones((1, len(each)))).text_embeds)[0])
        return results
    model = load_sequence_classification_model(folder)
    for each, second in zip(texts, types, strict=True):
        mask = mx.ones((1, len(each)))
        logits = model(mx.array([each]), attention_mask=mask, token_type_ids=mx.array([second])).logits
        results.append(numpy_encoders.sigmoid(np.asarray(logits, np.float64)[0]))
    return results


@pytest.mark.parametrize(
    ("family", "reranker"),
    [
        ("bert", False),
        ("xlm-roberta", False),
        ("modernbert", False),
        ("qwen3", False),
        ("gemma3_text", False),
        ("bert", True),
        ("xlm-roberta", True),
        ("modernbert", True),
    ],
)
def test_mlx_vlm_agrees(family: str, reranker: bool, tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm")
    # mlx-vlm's Gemma has no windows when it embeds, and its own dense layers.
    changes = {"sliding_window": 512} if family == "gemma3_text" else {}
    folder = write_encoder(
        tmp_path, family, pooling="lasttoken" if family == "qwen3" else "mean", reranker=reranker, **changes
    )
    if family == "gemma3_text":
        _write_gemma_dense(folder)
    texts = inputs()
    firsts = [len(each) // 2 + 1 if family == "bert" else len(each) for each in texts] if reranker else []
    types = [[int(place >= first) for place in range(len(each))] for each, first in zip(texts, firsts, strict=False)]
    expected = _mlx_vlm(folder, texts, types if reranker else None)
    with encoder_engine(folder) as driver:
        _, together = encode_alone_and_together(driver, texts, firsts)
    # mlx-vlm's ModernBERT approximates GELU by tanh; that of transformers, and ours, does not.
    np.testing.assert_allclose(together, expected, atol=3e-4 if family == "modernbert" else CLOSE)


def _write_gemma_dense(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    draw = np.random.default_rng(3)
    for number, (out, into) in ((2, (128, 32)), (3, (32, 128))):
        path = folder / f"{number}_Dense"
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"activation_function": "torch.nn.modules.linear.Identity"}))
        layer = draw.normal(size=(out, into)).astype(np.float32) / 6
        save_file({"linear.weight": layer}, path / "model.safetensors")
        modules.insert(number, {"path": path.name, "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
