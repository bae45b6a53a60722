"""Quantised KV caches over HTTP: models with them, one without, and one that does not support them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.config import ModelSpec, Settings
from support.server import running
from support.tiers import some
from support.tiny import write_servable

PATIENCE = 60


def ask(url: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "the stream turns the mill " * 4, "max_tokens": 12, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=PATIENCE)


@pytest.mark.parametrize("isolation", some(["thread", "process"], ["thread"]))
def test_models_with_and_without_side_by_side(isolation: str, tmp_path: Path) -> None:
    wide = str(write_servable(tmp_path / "wide", head_dim=64))
    narrow = str(write_servable(tmp_path / "narrow"))
    models = (
        ModelSpec(wide, "eight"),
        ModelSpec(wide, "four", kv_bits=4),
        ModelSpec(wide, "plain", kv_bits=0),
        ModelSpec(narrow, "narrow"),
    )
    settings = Settings(models=models, port=0, isolation=isolation, kv_bits=8, memory=2**30)
    with running(settings) as server:
        reserved: dict[str, Any] = {}
        for card in httpx.get(f"{server.url}/v1/models", timeout=PATIENCE).json()["data"]:
            reserved[card["id"]] = card.get("reserved_bytes")
            if card["id"] == "narrow":
                assert card["state"] == "failed"
                assert "kv_bits = 8" in card["error"] and "Leave out kv_bits" in card["error"]
        assert reserved["four"] < reserved["eight"] < reserved["plain"]
        for model in ("eight", "four", "plain"):
            cold, warm = ask(server.url, model).json(), ask(server.url, model).json()
            assert warm["choices"] == cold["choices"]
            assert len(cold["choices"][0]["text"]) > 0
            assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        refused = ask(server.url, "narrow")
        assert refused.status_code == 503
        assert "its head size is 16" in refused.json()["error"]["message"]
