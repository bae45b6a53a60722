"""Vision-language models: recognised by configuration, and their estimates include the towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_estimate import loaded

from millstream.models.estimate import estimate
from millstream.models.source import ModelSource
from millstream.models.vision import is_vision_model
from support.tiny import FAMILIES as TEXT_FAMILIES
from support.tiny_vision import FAMILIES, write_vision_model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_recognised(family: str) -> None:
    assert is_vision_model(FAMILIES[family])


@pytest.mark.parametrize(
    "config",
    [
        *TEXT_FAMILIES.values(),
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
        {"model_type": "gemma3_text", "vision_config": {}},
        {"model_type": "unknown", "vision_config": {}},
        {**FAMILIES["llava"], "text_config": {"model_type": "mistral"}},
        {**FAMILIES["mistral3"], "text_config": {"model_type": "mistral4"}},
    ],
)
def test_other_models_are_served_as_text_models(config: dict[str, Any]) -> None:
    assert not is_vision_model(config)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4-small", "gemma4-audio", "idefics3", "pixtral"])
def test_the_estimate_counts_the_towers(family: str, tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / family, family)
    estimated = estimate(ModelSource("m", "folder", folder), device="cpu", unpack=True)
    facts = loaded(folder)
    assert 0.99 * facts.weight_bytes < estimated.weight_bytes <= facts.weight_bytes
    assert estimated.kv_bytes_per_token == facts.kv_bytes_per_token
