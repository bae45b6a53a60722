"""Unusual conversations over HTTP, with templates that refuse or drop them: each turn finds its prefix in the cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.config import ModelSpec, Settings
from support.server import running
from support.template_shapes import SHAPES
from support.tiny import write_servable

NAMES = ("no-system", "alternates", "drops")
BLOCK = 16
"""Tokens of a KV block: the last, incomplete one of a prompt is not cached."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write_servable(tmp_path_factory.mktemp("talk") / "model", max_position_embeddings=2048)
    for name in NAMES:
        other = folder.with_name(name)
        other.mkdir()
        for file in folder.iterdir():
            (other / file.name).write_bytes(file.read_bytes())
        _set_template(other, SHAPES[name])
    specs = tuple(ModelSpec(str(folder.with_name(name)), name=name) for name in NAMES)
    with running(Settings(models=specs, port=0, isolation="thread")) as server:
        yield server.url


def _set_template(folder: Path, template: str) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


def ask(url: str, model: str, messages: list[dict[str, Any]]) -> tuple[int, int]:
    """Returns how many tokens the prompt has, and how many of them were cached."""
    body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("model", NAMES)
def test_each_turn_finds_the_turn_before_in_the_cache(url: str, model: str) -> None:
    header = "x-anthropic-billing-header: cch={};\n"
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    added: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": "Be kind."}, {"role": "system", "content": "Be brief."}, _user("Hi")],
        [_assistant("Yes?"), {"role": "system", "content": "The user is in a hurry."}],
        [_assistant(""), _user("One"), _user("Two")],
        [{**_assistant("I look."), "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "seen"}],
        [
            _assistant("It is there."),
            _assistant("Anything else?"),
            {"role": "tool", "tool_call_id": "b", "content": "?"},
        ],
        [_assistant("No."), {"role": "developer", "content": [{"type": "text", "text": "Say goodbye."}]}],
    ]
    messages: list[dict[str, Any]] = []
    before = 0
    for number, turn in enumerate(added):
        messages += turn
        first = {**messages[0], "content": header.format(number) + messages[0]["content"]}
        tokens, cached = ask(url, model, [first, *messages[1:]])
        assert tokens > before and cached >= before - BLOCK, (number, tokens, cached)
        before = tokens


def test_the_log_says_once_that_a_template_changes_earlier_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_servable(tmp_path / "model")
    _set_template(folder, "{{ messages | length }}" + SHAPES["anywhere"])
    with caplog.at_level(logging.INFO, "millstream"), running(Settings(models=(str(folder),), port=0)) as server:
        server.wait_ready()
        for messages in ([_user("a")], [_user("a"), _assistant("b"), _user("c")]):
            ask(server.url, "model", messages)
    lines = [record.getMessage() for record in caplog.records if "chat template:" in record.getMessage()]
    assert len(lines) == 1 and "renders earlier turns anew" in lines[0]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
