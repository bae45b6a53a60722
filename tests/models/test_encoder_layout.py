"""What a folder says of an embedding model or a reranker: read, never guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import ModelError
from millstream.models.encoder_config import BertConfig, ModernBertConfig, NomicConfig
from millstream.models.encoder_layout import DenseLayer, kind_of, read_layout

BERT = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "max_position_embeddings": 512,
}
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
MEAN = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def write(folder: Path, name: str, value: object) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "config.json", BERT)
    write(tmp_path, "modules.json", [TRANSFORMER, POOLING, NORMALIZE])
    write(tmp_path, "1_Pooling/config.json", MEAN)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (BERT, "embedding"),
        ({**BERT, "architectures": ["BertForSequenceClassification"]}, "rerank"),
        ({"model_type": "modernbert"}, "embedding"),
        ({"model_type": "xlm_roberta"}, "embedding"),
        ({"model_type": "llama"}, "generation"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "generation"),
        ({"model_type": "qwen3", "architectures": None}, "generation"),
    ],
)
def test_the_kind_by_the_configuration_alone(config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    assert kind_of(tmp_path, config) == kind


def test_the_kind_by_modules_and_by_name(tmp_path: Path) -> None:
    qwen = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    embedder, reranker = tmp_path / "Qwen3-Embedding-0.6B", tmp_path / "Qwen3-Reranker-0.6B-4bit"
    write(embedder, "modules.json", [TRANSFORMER, POOLING])
    reranker.mkdir()
    assert kind_of(embedder, qwen) == "embedding"
    assert kind_of(reranker, qwen) == "rerank"
    scored = tmp_path / "scored"
    write(scored, "modules.json", [TRANSFORMER, {"type": "sentence_transformers.cross_encoder.modules.LogitScore"}])
    assert kind_of(scored, qwen) == "rerank"


def test_the_usual_layout(folder: Path) -> None:
    layout = read_layout(folder)
    assert (layout.kind, layout.family, layout.pooling, layout.normalize) == ("embedding", "bert", ("mean",), True)
    assert layout.max_tokens == 512
    assert layout.dimensions == () and layout.notes == ()


@pytest.mark.parametrize("package", ["sentence_transformers.sentence_transformer.modules.{}", "my_module.{}", "{}"])
def test_modules_are_known_by_their_class_whatever_its_package(folder: Path, package: str) -> None:
    names = [
        {**each, "type": package.format(each["type"].rpartition(".")[2])} for each in (TRANSFORMER, POOLING, NORMALIZE)
    ]
    write(folder, "modules.json", names)
    layout = read_layout(folder)
    assert (layout.pooling, layout.normalize) == (("mean",), True)


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({"pooling_mode_cls_token": True}, ("cls",)),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, ("last",)),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, ("cls", "mean")),
        ({"pooling_mode_max_tokens": True}, ("max",)),
        ({"pooling_mode_weightedmean_tokens": True}, ("weighted_mean",)),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ("mean_sqrt_len",)),
        ({"pooling_mode": "lasttoken"}, ("last",)),
        ({"pooling_mode": ["cls", "weightedmean"]}, ("cls", "weighted_mean")),
    ],
)
def test_pooling_modes(folder: Path, settings: dict[str, Any], modes: tuple[str, ...]) -> None:
    write(folder, "1_Pooling/config.json", settings)
    assert read_layout(folder).pooling == modes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no known pooling mode; known: cls"),
        ({"pooling_mode": "attention"}, "no known pooling mode"),
        ({"pooling_mode": 3}, "no known pooling mode"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt"),
    ],
)
def test_pooling_that_is_not_supported(folder: Path, settings: dict[str, Any], message: str) -> None:
    write(folder, "1_Pooling/config.json", settings)
    with pytest.raises(ModelError, match=message):
        read_layout(folder)


def test_dense_layers_with_their_activations(folder: Path) -> None:
    dense = [{"path": f"{n}_Dense", "type": "sentence_transformers.models.Dense"} for n in (2, 3)]
    write(folder, "modules.json", [TRANSFORMER, POOLING, *dense, NORMALIZE])
    write(folder, "2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.Tanh"})
    write(folder, "3_Dense/config.json", {})
    assert read_layout(folder).dense == (DenseLayer("2_Dense", "tanh"), DenseLayer("3_Dense", ""))
    write(folder, "3_Dense/config.json", {"activation_function": "torch.nn.Softshrink"})
    with pytest.raises(ModelError, match="activation 'Softshrink' is not supported; supported: Identity"):
        read_layout(folder)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (
            [TRANSFORMER, {"path": "1_LSTM", "type": "sentence_transformers.models.LSTM"}],
            "module 'LSTM' is not supported",
        ),
        ([TRANSFORMER, NORMALIZE], "no Pooling module"),
        ([TRANSFORMER, {**POOLING, "path": "../elsewhere"}], "outside the model's folder"),
        ([TRANSFORMER, {**POOLING, "path": "/etc"}], "outside the model's folder"),
        ({"modules": []}, "must be a list of modules"),
        (["Transformer"], "must be a list of modules"),
    ],
)
def test_modules_that_are_not_supported(folder: Path, modules: object, message: str) -> None:
    write(folder, "modules.json", modules)
    with pytest.raises(ModelError, match=message):
        read_layout(folder)


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere, "config.json", MEAN)
    (folder / "linked").symlink_to(elsewhere)
    write(folder, "modules.json", [TRANSFORMER, {**POOLING, "path": "linked"}])
    with pytest.raises(ModelError, match="outside the model's folder"):
        read_layout(folder)


def test_damaged_files_are_named(folder: Path) -> None:
    (folder / "modules.json").write_text("[{")
    with pytest.raises(ModelError, match=r"modules\.json: is not valid JSON"):
        read_layout(folder)


def test_prompts_are_read_with_the_default(folder: Path) -> None:
    prompts = {"query": "query: ", "document": "passage: "}
    write(folder, "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    layout = read_layout(folder)
    assert dict(layout.prompts) == prompts and layout.default_prompt == "query"
    for default in ("unknown", None, ["query"]):
        write(folder, "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": default})
        assert read_layout(folder).default_prompt is None
    write(folder, "config_sentence_transformers.json", {"prompts": None})
    assert read_layout(folder).prompts == ()


def test_sizes_that_the_model_was_trained_for(folder: Path) -> None:
    write(folder, "config.json", {**BERT, "matryoshka_dimensions": [4, 8]})
    assert read_layout(folder).dimensions == (4, 8)
    write(folder, "config.json", {**BERT, "matryoshka_dimensions": ["4"]})
    assert read_layout(folder).dimensions == ()


@pytest.mark.parametrize(("author", "most"), [(128, 128), (9000, 512), (0, 512), ("256", 512), (True, 512)])
def test_the_limit_is_the_authors_within_what_positions_allow(folder: Path, author: object, most: int) -> None:
    write(folder, "sentence_bert_config.json", {"max_seq_length": author})
    assert read_layout(folder).max_tokens == most


def test_families_that_count_positions_from_the_padding_token(tmp_path: Path) -> None:
    roberta = {**BERT, "model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 514}
    write(tmp_path, "config.json", roberta)
    assert read_layout(tmp_path).max_tokens == 512
    assert BertConfig.read(roberta).first_position == 2
    assert BertConfig.read({**BERT, "pad_token_id": 0}).first_position == 0


def test_without_modules_the_pooling_is_said_aloud(tmp_path: Path) -> None:
    write(tmp_path, "config.json", BERT)
    layout = read_layout(tmp_path)
    assert (layout.pooling, layout.normalize) == (("mean",), True)
    assert layout.notes == ("no modules.json: mean pooling, normalised",)
    write(tmp_path, "config.json", {"model_type": "qwen3"})
    assert read_layout(tmp_path, "embedding").pooling == ("last",)


def test_rerankers_have_one_label(tmp_path: Path) -> None:
    classifier = {**BERT, "architectures": ["BertForSequenceClassification"]}
    for labels in ({"id2label": {"0": "LABEL_0"}}, {"num_labels": 1}, {}):
        write(tmp_path, "config.json", {**classifier, **labels})
        layout = read_layout(tmp_path)
        assert (layout.kind, layout.yes_no) == ("rerank", False)
    write(tmp_path, "config.json", {**classifier, "id2label": {"0": "neg", "1": "pos"}})
    with pytest.raises(ModelError, match="one label, but this classifier has 2"):
        read_layout(tmp_path)


def test_a_family_that_is_not_supported_is_refused_with_those_that_are(folder: Path) -> None:
    write(folder, "config.json", {"model_type": "t5"})
    with pytest.raises(ModelError, match=r"family 't5' is not supported for embedding\. Supported: bert, .*qwen3"):
        read_layout(folder)


@pytest.mark.parametrize(
    ("read", "config", "message"),
    [
        (BertConfig, {**BERT, "num_hidden_layers": "2"}, "num_hidden_layers is '2'; it must be a whole number above 0"),
        (BertConfig, {**BERT, "num_attention_heads": 0}, "num_attention_heads is 0"),
        (BertConfig, {**BERT, "position_embedding_type": "relative_key"}, "'relative_key' is not supported"),
        (NomicConfig, {"prenorm": True}, "prenorm is True; only False"),
        (NomicConfig, {"activation_function": "gelu"}, "only 'swiglu' is supported"),
    ],
)
def test_configurations_that_are_not_supported(read: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read.read(config)


def test_modernberts_layers_in_both_spellings() -> None:
    config = {"num_hidden_layers": 6, "num_attention_heads": 2}
    assert ModernBertConfig.read(config).global_layers == {0, 3}
    types = ["full_attention", "sliding_attention"] * 3
    assert ModernBertConfig.read({**config, "layer_types": types}).global_layers == {0, 2, 4}


def test_modernberts_rotary_positions_in_both_spellings() -> None:
    config = {"num_hidden_layers": 6, "num_attention_heads": 2}
    read = ModernBertConfig.read(config)
    assert (read.global_theta, read.local_theta) == (160_000, 10_000)
    read = ModernBertConfig.read({**config, "global_rope_theta": 5.0, "local_rope_theta": None})
    assert (read.global_theta, read.local_theta) == (5, 5)
    new = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 3.0, "rope_type": "default"}}
    read = ModernBertConfig.read({**config, "rope_parameters": new})
    assert (read.global_theta, read.local_theta) == (7, 3)
