"""A server with three models: one that chats, one that embeds and one that ranks. All are tiny and random."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.config import Settings
from support.server import RunningServer, running
from support.tiny import write_servable
from support.tiny_encoders import write_encoder

PROMPTS = {"query": "what is ", "document": "the mill ", "note": "a "}


def write_three(root: Path) -> tuple[str, ...]:
    """Folders named `chat`, `embed` and `rank`."""
    write_servable(root / "chat")
    embed = write_encoder(root / "embed", "bert", tokenizer=True)
    settings: dict[str, Any] = {"prompts": PROMPTS, "default_prompt_name": None}
    (embed / "config_sentence_transformers.json").write_text(json.dumps(settings))
    write_encoder(root / "rank", "bert", reranker=True, tokenizer=True)
    return tuple(str(root / name) for name in ("chat", "embed", "rank"))


@pytest.fixture(scope="session")
def three_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return write_three(tmp_path_factory.mktemp("three-kinds"))


@pytest.fixture(scope="session")
def encoders(three_models: tuple[str, ...]) -> Iterator[RunningServer]:
    with running(Settings(models=three_models, port=0, isolation="thread")) as server:
        yield server
