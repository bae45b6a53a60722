"""Suggestions for misspelt models: what is in the cache, in this folder and beside a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.errors import ModelError
from millstream.models.nearby import cached_ids, hub_cache, nearest_names, suggestion
from millstream.models.source import resolve


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two models, and a model folder and a file in the current folder."""
    hub = tmp_path / "hub"
    for name in (
        "models--mlx-community--Qwen3-4B-4bit",
        "models--org--some-model",
        "datasets--org--data",
        "version.txt",
    ):
        (hub / name).mkdir(parents=True)
    work = tmp_path / "work"
    (work / "my-model").mkdir(parents=True)
    (work / "my-model" / "config.json").write_text("{}")
    (work / "llama.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(work)
    return work


def test_what_is_in_the_cache() -> None:
    assert cached_ids() == ["mlx-community/Qwen3-4B-4bit", "org/some-model"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("mlx-comunity/Qwen3-4B-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("qwen3-4b-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("qwen3", "mlx-community/Qwen3-4B-4bit"),
        ("some_model", "org/some-model"),
        ("my-modle", "my-model"),
        ("./lama.gguf", "llama.gguf"),
    ],
)
def test_a_model_on_this_machine_is_suggested(wrong: str, right: str) -> None:
    assert f"Did you mean {right}" in suggestion(wrong)
    with pytest.raises(ModelError, match=f"Did you mean {right}"):
        resolve(wrong, report=print)


def test_a_neighbour_of_a_path(machine: Path) -> None:
    wrong = machine.parent / "work" / "my-mdel"
    assert suggestion(str(wrong)) == f" Did you mean {machine}/my-model?"


def test_nothing_is_suggested_for_something_else() -> None:
    assert suggestion("completely-different") == ""
    assert nearest_names("x", []) == []


def test_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the hub's own client finds it."""
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert hub_cache() == tmp_path / "hub"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub_cache() == tmp_path / "huggingface" / "hub"
