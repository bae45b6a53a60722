"""Limits and bad input, on a real server with a tiny model: each gets a clear error, and the server stays up."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from millstream.config import Settings
from support.server import RunningServer, running

BODY_LIMIT = 20_000
CONTEXT = 512


@pytest.fixture(scope="module")
def server(servable: Path) -> Iterator[RunningServer]:
    with running(Settings((str(servable),), port=0, max_batch=8, queue=100, body_limit=BODY_LIMIT)) as subject:
        yield subject


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "hello", "temperature": 0, **fields})


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    assert set(found) >= {"message", "type", "param", "code"}
    return found


def gauge(http: httpx.Client, name: str) -> float:
    line = next(line for line in http.get("/metrics").text.splitlines() if line.startswith(f"{name}{{"))
    return float(line.split()[-1])


def wait_idle(http: httpx.Client) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if gauge(http, "millstream_active_requests") == 0:
            return
        pause.wait(0.01)
    pytest.fail("rows were never freed")


def test_64_clients_that_all_disconnect(server: RunningServer, http: httpx.Client) -> None:
    expected = complete(http, max_tokens=20).json()["choices"][0]["text"]
    content = json.dumps({"prompt": "hello", "max_tokens": 400, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(64)]
    for client in clients:
        client.sendall(head + content)
    for client in clients[:8]:
        assert client.recv(15) == b"HTTP/1.1 200 OK"
    for client in clients:
        client.close()
    wait_idle(http)
    assert gauge(http, "millstream_waiting_requests") == 0
    assert complete(http, max_tokens=20).json()["choices"][0]["text"] == expected


def test_a_prompt_over_the_context_names_both_counts(http: httpx.Client) -> None:
    problem = error(complete(http, prompt="x" * 600), 400)
    assert problem["code"] == "context_length_exceeded"
    assert "600" in problem["message"]
    assert str(CONTEXT) in problem["message"]


def test_output_stops_at_the_context_length(http: httpx.Client) -> None:
    reply = complete(http, prompt="x" * (CONTEXT - 5), max_tokens=50, ignore_eos=True).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    usage = reply["usage"]
    assert [usage[f"{kind}_tokens"] for kind in ("prompt", "completion", "total")] == [CONTEXT - 5, 5, CONTEXT]


def test_a_body_over_the_limit(http: httpx.Client) -> None:
    problem = error(complete(http, prompt="x" * BODY_LIMIT), 413)
    assert str(BODY_LIMIT) in problem["message"]
    assert complete(http, max_tokens=1).status_code == 200


def test_the_error_for_an_unknown_model_lists_the_served_ones(server: RunningServer) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match=r"'gpt-9' is not served here. Served: tiny"),
    ):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [5, 9999]}, "token 9999, which this model has no embedding for: its token ids are 0 to 258"),
        ({"prompt": ["ok", ""]}, "prompt 1 is empty"),
        ({"logit_bias": {"9999": 1}}, "0 to 258"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"temprature": 1}, "Did you mean temperature?"),
    ],
)
def test_bad_requests_say_what_is_wrong(http: httpx.Client, fields: dict[str, Any], words: str) -> None:
    assert words in error(complete(http, **fields), 400)["message"]


def test_an_unknown_role_is_a_bad_request(http: httpx.Client) -> None:
    reply = http.post("/v1/chat/completions", json={"messages": [{"role": "wizard", "content": "hi"}]})
    assert error(reply, 400)["param"] == "messages[0].role"


def test_metrics_count_requests_and_tokens(http: httpx.Client) -> None:
    def counted(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = counted("millstream_generated_tokens_total")
    complete(http, max_tokens=7, ignore_eos=True)
    assert counted("millstream_generated_tokens_total") == before + 7
    assert counted('millstream_requests_total{model="tiny",outcome="finished"}') >= 1
    assert counted("millstream_time_to_first_token_seconds_count") >= 1
