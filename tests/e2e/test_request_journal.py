"""/server/status, /server/history and /server/requests of a real server, and the log line of each request.

The backend stops inside its steps, so that each state can be seen.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream import __version__
from millstream.config import Settings
from support.fake import FakeBackend, Gate
from support.openapi import Document
from support.server import RunningServer, running

WAIT = 60
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "a swordfish swims"}], "max_tokens": 40, "ignore_eos": True}
KEY = {"authorization": "Bearer key"}


class Held:
    """A server whose model waits in each step until it is let go, unless its gate is open."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.backends: list[FakeBackend] = []
        self.server: RunningServer | None = None
        self.http = httpx.Client()

    def make(self, *_: object) -> FakeBackend:
        backend = FakeBackend(max_rows=1, vocab_size=259, gate=self.gate)
        self.backends.append(backend)
        return backend

    def get(self, path: str) -> Any:
        response = self.http.get(path, headers=KEY)
        assert response.status_code == 200, response.text
        return response.json()

    def until(self, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """/server/requests, once `what` holds of it."""
        deadline = time.monotonic() + WAIT
        while not what(found := self.get("/server/requests")):
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        return found

    def post_soon(self, **changes: Any) -> threading.Thread:
        thread = threading.Thread(target=self.http.post, args=(CHAT,), kwargs={"json": BODY | changes, "headers": KEY})
        thread.start()
        return thread


@pytest.fixture
def held(servable: Path) -> Iterator[Held]:
    held = Held()
    settings = Settings((str(servable),), port=0, max_batch=1, api_keys=("key",), log_content=False)
    with running(settings, held.make) as server, httpx.Client(base_url=server.url, timeout=WAIT) as held.http:
        held.server = server
        yield held
        held.gate.open()


def states(found: dict[str, Any]) -> list[str]:
    return [request["state"] for request in found["running"]]


def test_a_request_goes_through_its_phases(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = held.post_soon()
    held.gate.wait_entered()
    assert states(held.until(lambda found: states(found) == ["prefill"])) == ["prefill"]
    second = held.post_soon()
    assert held.until(lambda found: states(found) == ["queued", "prefill"])["recent"] == []
    for _ in range(4):  # its prompt is computed, and it has tokens, but not all of them
        held.gate.let_one()
        held.gate.wait_entered()
    held.until(lambda found: states(found) == ["queued", "decode"])
    held.gate.open()
    for thread in (first, second):
        thread.join(WAIT)
    found = held.until(lambda found: len(found["recent"]) == 2)
    assert found["running"] == []
    for request in found["recent"]:
        assert [phase["name"] for phase in request["phases"]] == ["prepare", "queue", "prefill", "decode"]
        edges = [(phase["start"], phase["end"]) for phase in request["phases"]]
        assert edges[0][0] == request["started"] and edges == sorted(edges)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(edges)), "no gaps"
        assert (request["state"], request["finish_reason"], request["error"]) == ("done", "length", None)
        assert (request["dialect"], request["endpoint"]) == ("openai", CHAT)
        assert request["completion_tokens"] == 40 and request["prompt_tokens"] > 4
        assert 0 < request["first_token"] <= request["total"]
    newest, oldest = found["recent"]
    assert newest["started"] > oldest["started"], "newest first"
    assert newest["phases"][1]["end"] >= oldest["phases"][3]["start"], "it waited for the row of the first"
    lines = [each.getMessage() for each in caplog.records if each.name == "millstream.service.request_log"]
    assert [line.split()[0] for line in lines] == [oldest["id"], newest["id"]]
    assert all("40 tokens out, length; queue " in line and ", first token " in line for line in lines)
    assert "swordfish" not in caplog.text, "prompts are not logged"


def test_what_failed_was_cancelled_or_refused_is_told(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    gate = held.gate
    thread = held.post_soon()
    gate.wait_entered()
    held.backends[0].fail_next = RuntimeError("out of paper")
    gate.let_one()
    thread.join(WAIT)
    [failed] = held.until(lambda found: bool(found["recent"]))["recent"]
    assert failed["state"] == "failed" and "out of paper" in failed["error"]
    with held.http.stream("POST", CHAT, json=BODY | {"stream": True, "max_tokens": 1000}, headers=KEY) as response:
        gate.wait_entered()
        request_id = response.headers["x-request-id"]
    gate.open()
    found = held.until(lambda found: found["recent"][0]["id"] == request_id)
    assert (found["recent"][0]["state"], found["recent"][0]["finish_reason"]) == ("cancelled", "cancelled")
    refused = held.http.post(CHAT, json=BODY | {"model": "nobody"}, headers=KEY)
    found = held.until(lambda found: len(found["recent"]) == 3)
    assert (found["recent"][0]["model"], found["recent"][0]["state"]) == ("nobody", "failed")
    invalid = held.http.post(CHAT, json={"messages": "swordfish"}, headers=KEY)
    text = caplog.text
    for response, said in (
        (refused, "openai nobody: refused with 404, the model 'nobody' is not served here"),
        (invalid, f"openai POST {CHAT}: refused with 400, invalid_request (messages)"),
        (held.http.get("/nowhere", headers=KEY), "openai GET /nowhere: refused with 404, No such URL"),
        (held.http.get("/metrics"), "openai GET /metrics: refused with 401, This server requires an API key"),
    ):
        request_id = response.headers["x-request-id"]
        assert response.json()["error"]["request_id"] == request_id
        lines = [each.getMessage() for each in caplog.records if request_id in each.getMessage()]
        assert len(lines) == 1 and said in lines[0], (lines, text)
    assert f"{failed['id']} openai" in caplog.text and "failed with 500, the model failed in this step" in caplog.text
    assert "swordfish" not in caplog.text


def test_status_and_history_are_as_documented_and_need_a_key(held: Held) -> None:
    held.gate.open()
    assert held.http.post(CHAT, json=BODY, headers=KEY).status_code == 200
    document = Document(held.get("/openapi.json"))
    deadline = time.monotonic() + WAIT
    while not held.get("/server/history")["times"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for path in ("/server/status", "/server/history", "/server/requests"):
        assert held.http.get(path).status_code == 401
        document.check(path, held.http.get(path, headers=KEY))
    status = held.get("/server/status")
    assert status["version"] == __version__ and status["uptime"] > 0 and status["process"]["pid"] > 0
    history = held.get("/server/history")
    [model] = history["models"].values()
    assert all(len(series) == len(history["times"]) for series in model.values())
    assert held.get(f"/server/history?since={history['times'][-1] + 1000}")["times"] == []


@pytest.mark.parametrize("query", ["history?since=x", "history?since=nan", "requests?limit=-1", "requests?limit=501"])
def test_bad_parameters_are_explained(held: Held, query: str) -> None:
    response = held.http.get(f"/server/{query}", headers=KEY)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] in ("since", "limit") and error["param"] in error["message"]


def test_content_is_logged_only_if_asked(servable: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    settings = Settings((str(servable),), port=0, log_content=True)
    with running(settings, lambda *_: FakeBackend(vocab_size=259)) as server:
        answer = httpx.post(server.url + CHAT, json=BODY, timeout=WAIT).json()["choices"][0]["message"]["content"]
    lines = {each.fields["event"]: each.fields for each in caplog.records if hasattr(each, "fields")}
    assert lines["prompt"]["content"] == "user: a swordfish swims"
    assert lines["answer"]["content"] == answer
    assert lines["prompt"]["request_id"] == lines["request"]["request_id"]
    assert json.dumps(lines)
