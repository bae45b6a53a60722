"""What the files of a model say about it, without a load."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from millstream.errors import ModelError
from millstream.models.description import describe_files
from millstream.models.source import ModelSource, find_local
from millstream.text.loading import read_chat_template
from support.tiny import CHAT_TEMPLATE, byte_source
from support.tiny_gguf import write_gguf


def folder(path: Path, config: dict[str, object], tensors: dict[str, np.ndarray]) -> ModelSource:  # type: ignore[type-arg]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(path / "model.safetensors"))
    return ModelSource(path.name, "folder", path)


def test_a_gguf_file(tmp_path: Path) -> None:
    source = ModelSource("tiny", "gguf", write_gguf(tmp_path / "tiny.gguf"))
    files = describe_files(source)
    layer = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert files.parameters == 259 * 64 + 64 + 2 * layer
    assert (files.format, files.family, files.quantization, files.context_length) == ("gguf", "llama", "F32", 256)
    assert files.file_bytes == source.path.stat().st_size
    assert read_chat_template(source) == CHAT_TEMPLATE


def test_a_folder(tmp_path: Path) -> None:
    weights = {"model.a.weight": np.zeros((8, 4), np.float16), "model.norm.weight": np.zeros(4, np.float32)}
    source = folder(tmp_path / "m", {"model_type": "qwen3", "max_position_embeddings": 4096}, weights)
    files = describe_files(source)
    assert (files.format, files.family, files.parameters) == ("safetensors", "qwen3", 36)
    assert (files.quantization, files.context_length, files.file_bytes) == ("F16", 4096, 8 * 4 * 2 + 4 * 4)
    assert not files.sees_images
    assert read_chat_template(source) is None
    assert read_chat_template(byte_source(tmp_path)) == CHAT_TEMPLATE


def test_quantised_weights_are_counted_as_what_they_stand_for(tmp_path: Path) -> None:
    weights = {
        "model.a.weight": np.zeros((8, 16), np.uint32),  # 8 values of 4 bits in each
        "model.a.scales": np.zeros((8, 2), np.float16),
        "model.a.biases": np.zeros((8, 2), np.float16),
        "model.norm.weight": np.zeros(128, np.float16),
    }
    config = {"model_type": "llama", "quantization": {"group_size": 64, "bits": 4}}
    files = describe_files(folder(tmp_path / "m", config, weights))
    assert (files.parameters, files.quantization) == (8 * 128 + 128, "4-bit")


def test_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        describe_files(ModelSource("m", "folder", tmp_path / "m"))


def test_local_models_are_found_without_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    path = write_gguf(tmp_path / "tiny.gguf")
    assert find_local(str(path)) == ModelSource("tiny", "gguf", path)
    assert find_local(str(tmp_path)) == ModelSource("tiny", "gguf", path)
    assert find_local(None, cache_dir=tmp_path / "empty") is None
    assert find_local("./nowhere") is None and find_local("nowhere") is None
    assert find_local("org/not-in-the-cache", cache_dir=tmp_path) is None
