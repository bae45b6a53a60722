"""The corpus of broken model files: each is refused early, with a reason, and before memory is allocated for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from millstream.errors import ModelError
from millstream.models.checks import check_model
from millstream.models.config_check import StoredCounts, check_config
from millstream.models.gguf_file import open_gguf
from millstream.models.gguf_vocabulary import read_vocabulary
from millstream.models.source import resolve
from millstream.text.loading import load_tokenizer
from support.broken_models import FOLDERS, GGUFS, Broken
from support.tiny import write_servable
from support.tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_servable(tmp_path_factory.mktemp("good") / "tiny")


@pytest.fixture(scope="module")
def good_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("good") / "tiny.gguf")


def open_model(path: Path) -> None:
    """What the server does with a model before it starts an engine."""
    source = resolve(str(path), report=print)
    check_model(source.kind, source.path)
    load_tokenizer(source)


def test_the_undamaged_models_are_accepted(good: Path, good_gguf: Path) -> None:
    open_model(good)
    open_model(good_gguf)


@pytest.mark.parametrize("broken", FOLDERS, ids=lambda broken: broken.name)
def test_a_broken_folder_is_refused_with_a_reason(good: Path, tmp_path: Path, broken: Broken) -> None:
    folder = shutil.copytree(good, tmp_path / "broken")
    broken.damage(folder)
    with pytest.raises(ModelError, match=broken.words):
        open_model(folder)


@pytest.mark.parametrize("broken", GGUFS, ids=lambda broken: broken.name)
def test_a_broken_gguf_file_is_refused_with_a_reason(good_gguf: Path, tmp_path: Path, broken: Broken) -> None:
    path = Path(shutil.copy(good_gguf, tmp_path / "broken.gguf"))
    broken.damage(path)
    with pytest.raises(ModelError, match=broken.words):
        open_model(path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"tokens": ["a", "b"], "token_type": [1]}, "1 entries for 2 tokens"),
        ({"tokens": ["a"], "token_type": [3, 3, 3]}, "3 entries for 1 tokens"),
        ({"tokens": ["a"], "scores": [0.5, 1.0]}, "2 entries for 1 tokens"),
        ({"tokens": [1, 2]}, "tokens' is damaged"),
        ({"tokens": "abc"}, "tokens' is damaged"),
        ({"tokens": ["a"], "merges": [1]}, "merges' is damaged"),
        ({"tokens": ["a" * 2000]}, "too long"),
    ],
)
def test_vocabularies_of_mismatched_lists_are_refused(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_vocabulary({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("first", np.zeros((4, 32), np.float32))
    writer.add_tensor("other", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    position = data.index(b"other") + len("other") + 4 + 2 * 8 + 4
    path.write_bytes(data[:position] + bytes(8) + data[position + 8 :])
    with pytest.raises(ModelError, match="overlaps another"):
        open_gguf(path)


def test_values_of_published_configurations_are_accepted() -> None:
    """Lists per layer, infinities, negative token ids, huge contexts, settings of absent modules."""
    config = {
        "num_hidden_layers": 4,
        "num_key_value_heads": [2, 2, None, 1][:2],
        "intermediate_size": [96, 96],
        "head_dim": None,
        "num_experts": 0,
        "max_position_embeddings": 10_485_760,
        "rope_theta": 1e11,
        "time_step_limit": [0.0, float("inf")],
        "pad_token_id": -1,
        "eos_token_id": [1, 2],
        "model_max_length": 10**30,
        "num_parameters": 7 * 10**9,
        "vision_feature_layer": -2,
        "vision_config": None,
        "audio_config": {"num_hidden_layers": 12, "hidden_size": 64},
        "id2label": {"0": "no"},
        "auto_map": {"AutoModel": "own.Model"},
        "quantization": {"group_size": 64, "bits": 4, "model.layers.0.mlp": {"bits": 8, "group_size": 64}},
    }
    check_config(Path("config.json"), json.loads(json.dumps(config)), StoredCounts(tensors=38, largest=4096))
