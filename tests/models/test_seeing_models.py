"""Which configurations are those of models that see, and what they take with their towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_estimate import loaded

from millstream.models.estimate import estimate
from millstream.models.source import ModelSource
from millstream.models.vision import sees
from support.tiny import FAMILIES as BLIND
from support.tiny_vision import FAMILIES, write_vision_model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_known(family: str) -> None:
    assert sees(FAMILIES[family])


@pytest.mark.parametrize(
    "config",
    [
        *BLIND.values(),
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
        {"model_type": "gemma3_text", "vision_config": {}},
        {"model_type": "seer", "vision_config": {}},
        {**FAMILIES["llava"], "text_config": {"model_type": "mistral"}},
        {**FAMILIES["mistral3"], "text_config": {"model_type": "mistral4"}},
    ],
)
def test_others_are_served_as_text(config: dict[str, Any]) -> None:
    assert not sees(config)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4-small", "gemma4-audio", "idefics3", "pixtral"])
def test_the_estimate_counts_the_towers(family: str, tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / family, family)
    guess = estimate(ModelSource("m", "folder", folder), device="cpu", unpack=True)
    facts = loaded(folder)
    assert 0.99 * facts.weight_bytes < guess.weight_bytes <= facts.weight_bytes
    assert guess.kv_bytes_per_token == facts.kv_bytes_per_token
