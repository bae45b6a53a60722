"""The sampling that a model's files recommend."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from millstream.models.sampling_defaults import FILE, sampling_defaults
from millstream.models.source import ModelSource
from support.tiny_gguf import write_gguf

ADVICE = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
QWEN = {"do_sample": True, "eos_token_id": [1], **ADVICE}


@pytest.mark.parametrize(
    "config, expected",
    [
        (None, {}),
        ({}, {}),
        (QWEN, ADVICE),
        (QWEN | {"top_k": 40.0, "min_p": 0}, ADVICE | {"top_k": 40, "min_p": 0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": None, "temperature": None, "top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": -1, "top_p": 1}, {"top_k": -1, "top_p": 1}),
    ],
)
def test_of_a_folder(tmp_path: Path, config: dict[str, object] | None, expected: dict[str, float]) -> None:
    if config is not None:
        (tmp_path / FILE).write_text(json.dumps(config))
    assert dict(sampling_defaults(ModelSource("m", "folder", tmp_path))) == expected


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", 1e9),
        ("temperature", True),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", [20]),
        ("min_p", float("nan")),
        ("repetition_penalty", 0),
    ],
)
def test_a_value_that_cannot_be_is_told_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: object
) -> None:
    (tmp_path / FILE).write_text(json.dumps(QWEN | {name: value}))
    with caplog.at_level(logging.WARNING):
        found = dict(sampling_defaults(ModelSource("m", "folder", tmp_path)))
    assert found == {key: value for key, value in ADVICE.items() if key != name}
    assert name in caplog.text and str(tmp_path) not in caplog.text


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_text("[1]")
    assert sampling_defaults(ModelSource("m", "folder", tmp_path)) == ()
    assert "cannot be read" in caplog.text


def test_of_a_gguf_file(tmp_path: Path) -> None:
    recommended = {"temp": 0.5, "top_k": 20, "top_p": 0.75, "penalty_repeat": 1.5, "mirostat": 0}
    path = write_gguf(tmp_path / "tiny.gguf", recommended)
    found = dict(sampling_defaults(ModelSource("m", "gguf", path)))
    assert found == {"temperature": 0.5, "top_p": 0.75, "top_k": 20, "repetition_penalty": 1.5}
    assert sampling_defaults(ModelSource("m", "gguf", write_gguf(tmp_path / "plain.gguf"))) == ()
