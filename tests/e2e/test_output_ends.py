"""Where an output ends, on real servers: `min_tokens`, `stop_token_ids`, `suffix`, and prompts that are too long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

from millstream.config import Settings
from millstream.models.source import ModelSource
from support.scripted import ScriptedBackend
from support.server import RunningServer, running
from support.tiny import write_servable

FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


@pytest.fixture(scope="module")
def server(servable: Path) -> Iterator[RunningServer]:
    with running(Settings((str(servable),), port=0, isolation="thread")) as subject:
        yield subject


def complete(server: RunningServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"temperature": 0, "logprobs": 0, **body}, timeout=30)


def text_of(response: httpx.Response) -> tuple[list[str], str, int]:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    tokens = choice["logprobs"]["tokens"] if choice["logprobs"] else []
    return tokens, choice["finish_reason"], response.json()["usage"]["completion_tokens"]


def test_stop_tokens_count_after_the_minimum(server: RunningServer, servable: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(servable / "tokenizer.json"))
    prompt = tokenizer.encode("The mill").ids
    free, _, _ = text_of(complete(server, prompt=prompt, max_tokens=12, ignore_eos=True, logprobs=0))
    every_id = list(range(256))
    none, reason, _ = text_of(complete(server, prompt=prompt, max_tokens=12, stop_token_ids=every_id))
    assert (none, reason) == ([], "stop")
    half = every_id[::2]
    tokens, reason, count = text_of(
        complete(server, prompt=prompt, max_tokens=40, stop_token_ids=half, min_tokens=8, n_predict=40)
    )
    assert reason == "stop" and count > 8 and len(tokens) == count - 1
    assert len(free) == 12


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_stop_tokens_that_the_model_does_not_have(server: RunningServer, path: str) -> None:
    body = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    response = httpx.post(f"{server.url}/v1/{path}", json={**body, "stop_token_ids": [300]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "stop_token_ids") and "0 to 258" in error["message"]


def test_a_model_that_cannot_fill_in_the_middle(server: RunningServer) -> None:
    response = complete(server, prompt="a", suffix="b")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "suffix") and "fill in the middle" in error["message"]


@pytest.mark.parametrize("length", [512, 100_000, 6_000_000])
def test_too_long_prompts_in_the_words_that_clients_look_for(server: RunningServer, length: int) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "x" * length}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * length}]}),
    ]
    for path, body in bodies:
        response = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=30)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("This model's maximum context length is 512 tokens. However, ")


def test_the_parts_around_the_gap(tmp_path: Path) -> None:
    folder = write_servable(tmp_path / "tiny")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(FIM)
    tokenizer.save(str(folder / "tokenizer.json"))
    answer = tokenizer.encode("middle<|fim_suffix|>never").ids
    backend = ScriptedBackend(lambda submit: answer)

    def make(source: ModelSource, settings: Settings) -> ScriptedBackend:
        return backend

    with running(Settings((str(folder),), port=0), make) as server:
        response = complete(server, prompt="def f(", suffix="<|fim_middle|>\n", logprobs=None)
        plain = complete(server, prompt="def f(<|fim_suffix|>", logprobs=None)
    shown = tokenizer.decode(backend.submits[0].prompt, skip_special_tokens=False)
    assert shown == "<|fim_prefix|>def f(<|fim_suffix|><|fim_middle|>\n<|fim_middle|>"
    assert backend.submits[0].prompt.count(tokenizer.token_to_id("<|fim_middle|>")) == 1
    assert response.json()["choices"][0]["text"] == "middle"
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert plain.json()["choices"][0]["text"].startswith("middlenever"), "only the own tokens of the model end it"
