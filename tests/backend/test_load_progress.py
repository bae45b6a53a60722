"""The progress of a load moves with the bytes that are in memory, whatever form the weights come in."""

from __future__ import annotations

import gc
import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.weights import materialize
from support.tiny import BASE, VOCAB, write_model
from support.tiny_gguf import write_gguf

PORTION = 100_000
LARGER = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}


def write_quantised(folder: Path) -> Path:
    config: dict[str, Any] = {"model_type": "llama", **BASE, **LARGER, "vocab_size": VOCAB}
    config["quantization"] = {"group_size": 32, "bits": 4}
    module = importlib.import_module("mlx_lm.models.llama")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda value: mx.random.normal(value.shape) * 0.1, model.parameters()))
    nn.quantize(model, group_size=32, bits=4)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_half(folder: Path) -> Path:
    write_model(folder, "llama", **LARGER)
    file = str(folder / "model.safetensors")
    mx.save_safetensors(file, {name: value.astype(mx.bfloat16) for name, value in mx.load(file).items()})
    return folder


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialize, "PORTION", PORTION)


def load(kind: Any, path: Path) -> tuple[list[tuple[float, int]], int]:
    """What was told while loading, each with the bytes in memory at that moment; and the bytes of all weights."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    told: list[tuple[float, int]] = []

    def note(share: float, phase: str = "reading weights") -> None:
        if phase == "reading weights":
            told.append((share, mx.get_active_memory() - before))

    backend = MlxGenerationBackend(GenerationSettings(kind, path, max_rows=2))
    try:
        facts = backend.load(note)
    finally:
        backend.close()
    return told, facts.weight_bytes


@pytest.mark.usefixtures("small_portions")
@pytest.mark.parametrize("form", ["float32", "bfloat16", "quantised"])
def test_progress_moves_with_the_bytes(form: str, tmp_path: Path) -> None:
    folder = tmp_path / form
    if form == "float32":
        write_model(folder, "llama", **LARGER)
    else:
        write_half(folder) if form == "bfloat16" else write_quantised(folder)
    told, total = load("folder", folder)
    shares = [done for done, _ in told]
    assert len(shares) > 8
    assert shares == sorted(set(shares)) and shares[-1] == 1.0
    largest = 4 * 512 * 128
    for done, in_memory in told:
        # What waits for its portion is not evaluated; the embedding and norms of a portion may exceed it by an array.
        assert abs(in_memory - done * total) < PORTION + largest
    half = next(in_memory for done, in_memory in told if done >= 0.5)
    assert half < 0.7 * total, "everything was in memory when half of it was told"


@pytest.mark.usefixtures("small_portions")
def test_a_gguf_files_progress_moves_with_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialize, "PORTION", 8_000)
    told, total = load("gguf", write_gguf(tmp_path / "model.gguf"))
    shares = [done for done, _ in told]
    assert len(shares) > 5
    assert shares == sorted(set(shares)) and shares[-1] == 1.0
    for done, in_memory in told[:-1]:
        assert in_memory < (done + 0.3) * total


def test_a_model_of_no_bytes_is_loaded_at_once() -> None:
    told: list[float] = []
    assert materialize.evaluate_all([], told.append) == 0
    assert told == [1.0]
