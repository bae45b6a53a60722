"""What is told of models on disk without loading them: kinds, licences, sizes, speeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.models.card import licence_of
from millstream.models.gguf_choice import tag_of
from millstream.models.kind import kind_of
from millstream.models.last_used import forget_used, last_used, mark_used
from millstream.models.machine import memory_bytes
from millstream.models.sizes import size_text
from millstream.models.transfer import Transfer, duration_text


@pytest.mark.parametrize(
    ("config", "names", "kind"),
    [
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, (), "text"),
        ({"model_type": "qwen2_vl", "vision_config": {}}, (), "vision"),
        ({"model_type": "whisper"}, (), "audio"),
        ({"model_type": "voxtral", "audio_config": {}}, (), "audio"),
        ({"model_type": "bert"}, (), "embedding"),
        ({"model_type": "qwen3"}, ("modules.json",), "embedding"),
        ({"model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"]}, (), "reranker"),
        ({}, ("model_index.json",), "other"),
        ({"model_type": 3, "architectures": "x"}, (), "text"),
    ],
)
def test_kinds(config: dict[str, Any], names: tuple[str, ...], kind: str) -> None:
    assert kind_of(config, names) == kind


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\ntext", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: 'llama3.2'\n---\n", "llama3.2"),
        ("---\r\nlicense: mit # a comment\r\n---\r\n", "mit"),
        ("license: mit", None),
        ("---\nlicense: mit", None),
        ("---\ntags: [a]\n---\nlicense: mit\n", None),
        (b"\xff\xfe", None),
    ],
)
def test_licences(tmp_path: Path, card: str | bytes, licence: str | None) -> None:
    (tmp_path / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    assert licence_of(tmp_path) == licence


def test_no_card(tmp_path: Path) -> None:
    assert licence_of(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("Qwen3-4B-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q8_0.gguf", "q8_0"),
        ("sub/gemma-IQ4_XS.gguf", "IQ4_XS"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("x-UD-Q2_K_XL.gguf", "UD-Q2_K_XL"),
        ("Qwen3-4B.gguf", None),
    ],
)
def test_tags(name: str, tag: str | None) -> None:
    assert tag_of(name) == tag


@pytest.mark.parametrize(
    ("size", "text"),
    [(999, "999 bytes"), (4_300_000_000, "4.3 GB"), (638_000, "638 kB"), (999_999, "1.0 MB"), (2.5e15, "2500 TB")],
)
def test_sizes(size: float, text: str) -> None:
    assert size_text(size) == text


def test_a_transfer_tells_speed_and_time_left() -> None:
    now = 0.0
    transfer = Transfer(lambda: now)
    transfer.update(1_000_000_000, 4_000_000_000)
    assert transfer.text == "1.0 GB of 4.0 GB, 25 %"
    now = 2.0
    transfer.update(1_040_000_000, 4_000_000_000)
    assert transfer.text == "1.0 GB of 4.0 GB, 26 %, 20.0 MB/s, 2 min 28 s left"
    now = 30.0
    transfer.update(1_040_000_000, 4_000_000_000)
    now = 60.0
    transfer.update(1_040_000_000, 4_000_000_000)
    assert "/s" not in transfer.text, "nothing comes"
    transfer.update(4_000_000_000, 4_000_000_000)
    assert transfer.text == "4.0 GB of 4.0 GB, 100 %"


@pytest.mark.parametrize(("seconds", "text"), [(5.2, "5 s"), (61, "1 min 1 s"), (7300, "2 h 1 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_when_a_model_was_used(tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert last_used(model, tmp_path) is None
    mark_used(model, tmp_path)
    assert last_used(model, tmp_path) is not None
    forget_used(model, tmp_path)
    assert last_used(model, tmp_path) is None
    (tmp_path / "file").write_text("")
    mark_used(model, tmp_path / "file")  # cannot be written: no error


def test_the_memory_of_this_machine() -> None:
    size = memory_bytes("cpu")
    assert size is not None and size > 2**28
