"""A draft model over HTTP: the same answers, the memory of both, and a clear word if it does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.config import ModelSpec, Settings
from support.server import running
from support.tiers import some
from support.tiny import write_model, write_servable

PATIENCE = 60


def ask(url: str, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": "the stream turns the mill", "max_tokens": 40, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True, **more}, timeout=PATIENCE)


def with_another_vocabulary(folder: Path) -> Path:
    """The same tokens, but two of them in each other's place."""
    write_servable(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = tokenizer["model"]["vocab"]
    names["a"], names["b"] = names["b"], names["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("isolation", some(["thread", "process"], ["thread"]))
def test_a_draft_model_changes_no_answer_and_counts_in_memory(isolation: str, tmp_path: Path) -> None:
    target = str(write_servable(tmp_path / "target", seed=3))
    other = write_model(tmp_path / "window", "gemma3_text", vocab_size=259)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((Path(target) / name).read_bytes())
    models = (
        ModelSpec(target, "alone", draft="none"),
        ModelSpec(target, "drafted"),
        ModelSpec(target, "off", speculation="off"),
        ModelSpec(target, "foreign", draft=str(with_another_vocabulary(tmp_path / "foreign"))),
        ModelSpec(target, "windowed", draft=str(other)),
        ModelSpec(target, "missing", draft=str(tmp_path / "missing")),
    )
    settings = Settings(models=models, port=0, isolation=isolation, draft=target, draft_depth=4, memory=2**30)
    with running(settings) as server:
        cards = {card["id"]: card for card in httpx.get(f"{server.url}/v1/models", timeout=PATIENCE).json()["data"]}
        assert "64 is 'b', not 'a'" in cards["foreign"]["error"]
        assert "cannot be the draft model: its vocabulary is another one" in cards["foreign"]["error"]
        assert "must have full attention" in cards["windowed"]["error"]
        assert "the draft model" in cards["missing"]["error"] and "missing" in cards["missing"]["error"]
        alone, drafted = cards["alone"], cards["drafted"]
        assert drafted["weight_bytes"] == 2 * alone["weight_bytes"]
        assert drafted["kv_bytes_per_token"] == 2 * alone["kv_bytes_per_token"]
        assert drafted["reserved_bytes"] > 1.9 * alone["reserved_bytes"]
        assert "draft-model" in drafted["speculation"]["drafters"]
        assert "draft-model" not in alone["speculation"]["drafters"]
        assert any("draft model" in note for note in drafted["notes"])
        assert not (cards["off"]["speculation"] or {}).get("drafters")
        assert any("--speculation off" in note for note in cards["off"]["notes"])
        for sampling in ({}, {"temperature": 0.8, "seed": 7}):
            answers = [ask(server.url, name, **sampling).json()["choices"] for name in ("alone", "drafted", "off")]
            assert answers[0] == answers[1] == answers[2]
