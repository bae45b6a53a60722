"""Stored and background responses: retrieve, delete, cancel, list, stream again."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest

from millstream import errors
from millstream.api.app import create_app
from millstream.api.background import BackgroundTasks
from millstream.api.openai.responses import frame
from millstream.api.openai.responses.background import BackgroundRuns
from millstream.api.openai.responses.request import response_plan
from millstream.api.openai.responses.run import ResponseRun
from millstream.api.openai.responses.send import encoded
from millstream.api.openai.responses.stored import StoredResponses
from millstream.service.store.memory import MemoryRecords
from millstream.types import Delta
from support.openapi import Document
from support.responses import HELLO, Scripts, check_events, check_response, events_of, script
from support.services import services

PATH = "/v1/responses"
NOWHERE = f"resp_{'0' * 32}"


@pytest.fixture(scope="module")
def service() -> Scripts:
    return Scripts()


@pytest.fixture(autouse=True)
def fresh(service) -> None:
    service.reset()


@pytest.fixture(scope="module")
def records() -> MemoryRecords:
    return MemoryRecords(max_bytes=10**6, max_age=60.0)


@pytest.fixture(scope="module")
def http(service, records, serve_module) -> Iterator[httpx.Client]:
    app = create_app(services(service, records=records), body_limit=100_000)
    with serve_module(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


def create(http: httpx.Client, **body: object) -> dict[str, Any]:
    response = http.post(PATH, json={"input": "hi", **body})
    assert response.status_code == 200, response.text
    check_response(response.json())
    return response.json()


def test_what_is_stored_equals_what_was_sent_however_late(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second later."""
    seconds = itertools.count(1_000)
    monkeypatch.setattr(frame, "time", SimpleNamespace(time=lambda: next(seconds)))
    sent = create(http)
    assert http.get(f"{PATH}/{sent['id']}").json() == sent


def get(http: httpx.Client, response: dict[str, Any], route: str = "") -> dict[str, Any]:
    return http.get(f"{PATH}/{response['id']}{route}").json()


def until(http: httpx.Client, response: dict[str, Any], status: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (found := get(http, response))["status"] != status:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    check_response(found)
    return found


def missing(response: httpx.Response) -> None:
    assert response.status_code == 404 and response.json()["error"]["code"] == "response_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_stored_before_its_end_is_told(http, stream):
    raw = http.post(PATH, json={"input": "hi", "stream": stream})
    response = events_of(raw.content)[-1]["response"] if stream else raw.json()
    assert get(http, response) == response


def test_what_is_not_to_be_stored_is_not(http, records):
    before = len(records._records)
    missing(http.get(f"{PATH}/{create(http, store=False)['id']}"))
    assert len(records._records) == before


def test_a_failed_stream_is_stored(http, service):
    service.scripts = [[(Delta(0, "so far"),), errors.StepFailed("no")]]
    (*_, last) = events_of(http.post(PATH, json={"input": "hi", "stream": True}).content)
    assert get(http, last["response"])["status"] == "failed"


def test_delete(http):
    response = create(http)
    deleted = http.delete(f"{PATH}/{response['id']}")
    assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
    missing(http.get(f"{PATH}/{response['id']}"))
    missing(http.delete(f"{PATH}/{response['id']}"))
    refused = http.post(PATH, json={"input": "hi", "previous_response_id": response["id"]})
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize("wanted", [NOWHERE, "resp_x", "..%2Fx", "a b"])
@pytest.mark.parametrize("method, route", [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")])
def test_an_unknown_response(http, method, route, wanted):
    response = http.request(method, f"{PATH}/{wanted}{route}")
    assert response.status_code == 404


def test_a_link_that_is_gone_breaks_the_chain(http):
    first = create(http)
    second = create(http, previous_response_id=first["id"])
    http.delete(f"{PATH}/{first['id']}")
    refused = http.post(PATH, json={"input": "hi", "previous_response_id": second["id"]})
    assert refused.status_code == 404 and first["id"] in refused.json()["error"]["message"]


def test_input_items(http):
    items = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"id": "msg_mine", "role": "user", "content": [{"type": "input_text", "text": "five"}]},
    ]
    response = create(http, input=items)
    found = get(http, response, "/input_items?order=asc")
    assert (found["object"], found["has_more"]) == ("list", False)
    one, two, call, output, five = found["data"]
    assert one["content"] == [{"type": "input_text", "text": "one"}] and one["type"] == "message"
    assert two["content"] == [{"type": "output_text", "text": "two", "annotations": []}]
    assert call["id"].startswith("fc_") and output["output"] == "x" and five["id"] == "msg_mine"
    assert (found["first_id"], found["last_id"]) == (one["id"], five["id"])
    assert get(http, response, "/input_items")["data"] == [five, output, call, two, one]
    page = get(http, response, f"/input_items?limit=2&after={output['id']}")
    assert page["data"] == [call, two] and page["has_more"]
    assert get(http, response, f"/input_items?after={one['id']}")["data"] == []


@pytest.mark.parametrize(
    "query, param",
    [("limit=0", "limit"), ("limit=x", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after")],
)
def test_wrong_pages(http, query, param):
    response = http.get(f"{PATH}/{create(http)['id']}/input_items?{query}")
    assert response.status_code == 400 and response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "query, param", [("stream=yes", "stream"), ("starting_after=x", "starting_after"), ("stream=true", "stream")]
)
def test_wrong_retrievals(http, query, param):
    response = http.get(f"{PATH}/{create(http)['id']}?{query}")
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_a_background_response(http, service):
    service.gate = threading.Event()
    response = create(http, background=True)
    assert response["status"] == "queued" and response["output"] == []
    running = until(http, response, "in_progress")
    assert running["background"]
    refused = http.post(PATH, json={"input": "hi", "previous_response_id": response["id"]})
    assert refused.status_code == 400 and "not complete yet" in refused.json()["error"]["message"]
    service.gate.set()
    done = until(http, response, "completed")
    assert done["output"][0]["content"][0]["text"] == "Hello world" and done["usage"]["output_tokens"] == 5
    ended = http.post(f"{PATH}/{response['id']}/cancel").json()
    assert ended == done  # it stays as it is
    create(http, previous_response_id=response["id"])


def test_a_background_response_is_cancelled(http, service):
    service.gate = threading.Event()
    response = create(http, background=True)
    generation = service.generations.get(timeout=60)
    cancelled = http.post(f"{PATH}/{response['id']}/cancel").json()
    check_response(cancelled)
    assert cancelled["status"] == "cancelled" and generation.cancelled.is_set() and not generation.ended
    assert get(http, response)["status"] == "cancelled"
    *_, last = events_of(http.get(f"{PATH}/{response['id']}?stream=true").content)
    assert (last["type"], last["response"]) == ("response.cancelled", cancelled)


class HeldRecords(MemoryRecords):
    """Like a slow disk: writes nothing of a response that has ended until it is let go on."""

    def __init__(self) -> None:
        super().__init__(max_bytes=10**6, max_age=60.0)
        self.held, self.go_on = asyncio.Event(), asyncio.Event()

    async def put(self, key: str, record: bytes) -> None:
        if key.endswith("_events") or orjson.loads(record)["response"]["status"] in frame.ENDED:
            self.held.set()
            await asyncio.shield(asyncio.create_task(self._put_later(key, record)))
        else:
            await super().put(key, record)

    async def _put_later(self, key: str, record: bytes) -> None:
        await self.go_on.wait()
        await super().put(key, record)


class Background:
    """One background response, driven step by step."""

    def __init__(self, service: Scripts, records: MemoryRecords | None = None) -> None:
        self.records = records or MemoryRecords(max_bytes=10**6, max_age=60.0)
        everything = services(service, records=self.records)
        self.stored = StoredResponses(self.records)
        request, plan = response_plan({"input": "hi", "background": True}, everything.seal)
        self.run = ResponseRun(everything, self.stored, request, plan)
        self.id = self.run.frame.id
        self.tasks = BackgroundTasks()
        self.runs = BackgroundRuns(self.tasks, self.stored, encoded)
        self.background = self.runs.start(self.run)

    async def outcome(self) -> tuple[str, str, str]:
        """The status in the store, and the last event that a follower gets and that is stored."""
        followed = [part async for part in self.background.follow(-1)]
        replayed = await self.stored.events(self.id)
        found = await self.stored.get(self.id)
        assert replayed is not None
        last = [events_of(events)[-1]["type"] for events in (b"".join(followed), replayed)]
        return found.response["status"], last[0], last[1]


def test_a_background_response_is_cancelled_before_it_begins(service):
    async def run() -> tuple[str, str, str]:
        subject = Background(service)
        assert await subject.runs.cancel(subject.id)
        return await subject.outcome()

    assert asyncio.run(run()) == ("cancelled", "response.cancelled", "response.cancelled")
    assert not service.requests


def test_a_cancellation_that_comes_while_the_end_is_stored_changes_nothing(service):
    """Nor does a second one, and who polls meanwhile is told what is stored."""

    async def run() -> tuple[str, str, str]:
        subject = Background(service, records := HeldRecords())
        await records.held.wait()
        cancels = [asyncio.create_task(subject.runs.cancel(subject.id)) for _ in range(2)]
        poll = asyncio.create_task(subject.runs.working(subject.id))
        await asyncio.sleep(0)
        assert not [task for task in (*cancels, poll) if task.done()]
        records.go_on.set()
        assert await asyncio.gather(*cancels, poll) == [True, True, None]
        return await subject.outcome()

    assert asyncio.run(run()) == ("completed", "response.completed", "response.completed")


@pytest.mark.parametrize("when", ["working", "storing"])
def test_the_end_of_a_background_response_is_stored_when_the_server_stops(service, when):
    async def run() -> tuple[str, str, str]:
        service.gate = threading.Event()
        subject = Background(service, records := HeldRecords())
        if when == "storing":
            service.gate.set()
            await records.held.wait()
        while subject.run.status == "queued":  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0)
        closing = asyncio.create_task(subject.tasks.close())
        await asyncio.sleep(0)
        records.go_on.set()
        await closing
        return await subject.outcome()

    status = "failed" if when == "working" else "completed"
    assert asyncio.run(run()) == (status, f"response.{status}", f"response.{status}")


def test_a_background_response_is_deleted_while_it_runs(http, service):
    service.gate = threading.Event()
    response = create(http, background=True)
    generation = service.generations.get(timeout=60)
    assert http.delete(f"{PATH}/{response['id']}").status_code == 200
    assert generation.cancelled.is_set()
    missing(http.get(f"{PATH}/{response['id']}"))


def test_only_background_responses_are_cancelled(http):
    refused = http.post(f"{PATH}/{create(http)['id']}/cancel")
    assert refused.status_code == 400 and "background" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "error, code", [(errors.StepFailed("no"), "server_error"), (ZeroDivisionError("a bug"), "server_error")]
)
def test_a_background_response_fails(http, service, error, code):
    service.scripts = [[(Delta(0, "so far"),), error]]
    failed = until(http, create(http, background=True), "failed")
    assert failed["error"]["code"] == code and "a bug" not in str(failed)


def test_a_background_response_waits_for_a_free_engine(http, service):
    service.busy = [errors.EngineBusy("full", active=1, waiting=1, retry_after=0)] * 3
    until(http, create(http, background=True), "completed")
    assert len(service.requests) == 4


def test_a_prompt_that_is_too_long_in_the_background(http, service):
    service.limit = 1
    response = create(http, background=True)
    deadline = time.monotonic() + 60
    while (found := get(http, response))["status"] != "failed":
        assert time.monotonic() < deadline
    assert found["error"]["code"] == "context_length_exceeded"


def test_a_background_stream_goes_on_without_its_client(http, service):
    service.gate = threading.Event()
    service.scripts = [script(Delta(0, "one"), Delta(0, "two"))]
    with http.stream("POST", PATH, json={"input": "hi", "stream": True, "background": True}) as response:
        head = events_of(next(response.iter_raw()))
    assert [event["type"] for event in head[:2]] == ["response.created", "response.queued"]
    made = head[0]["response"]
    assert made["status"] == "queued"
    until(http, made, "in_progress")
    service.gate.set()
    until(http, made, "completed")
    events = events_of(http.get(f"{PATH}/{made['id']}?stream=true").content)
    check_events(events)
    assert events[-1]["type"] == "response.completed" and events[: len(head)] == head
    rest = events_of(http.get(f"{PATH}/{made['id']}?stream=true&starting_after=4").content)
    assert rest == events[5:]


def test_a_running_background_stream_is_followed(http, service):
    service.gate = threading.Event()
    made = create(http, background=True)
    until(http, made, "in_progress")
    with http.stream("GET", f"{PATH}/{made['id']}?stream=true&starting_after=1") as response:
        parts = response.iter_raw()
        first = next(parts)
        service.gate.set()
        events = events_of(first + b"".join(parts))
    assert [event["sequence_number"] for event in events] == list(range(2, 2 + len(events)))
    assert events[-1]["type"] == "response.completed"


def test_a_response_that_a_restart_has_ended(http, records):
    response = create(http)
    record = orjson.loads(asyncio.run(records.get(response["id"])))
    record["response"] |= {"status": "in_progress", "background": True}
    asyncio.run(records.put(response["id"], orjson.dumps(record)))
    found = get(http, response)
    assert found["status"] == "failed" and "stopped" in found["error"]["message"]


def test_background_tasks_end_with_their_owner():
    async def run() -> list[str]:
        tasks, ended = BackgroundTasks(limit=1), []

        async def forever() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("yes")

        tasks.start(forever())
        with pytest.raises(errors.Overloaded):
            tasks.start(forever())
        await asyncio.sleep(0)
        await tasks.close()
        return ended

    assert asyncio.run(run()) == ["yes"]


def test_the_answers_are_those_of_the_document(http, service):
    page = Document(create_app(services(None), body_limit=1000).openapi())
    page.check(PATH, http.post(PATH, json={"input": "hi"}))
    made = create(http, background=True)
    until(http, made, "completed")
    page.check("/v1/responses/{response_id}", http.get(f"{PATH}/{made['id']}"))
    page.check("/v1/responses/{response_id}/cancel", http.post(f"{PATH}/{made['id']}/cancel"))
    page.check("/v1/responses/{response_id}/input_items", http.get(f"{PATH}/{made['id']}/input_items"))
    page.check("/v1/responses/input_tokens", http.post(f"{PATH}/input_tokens", json={"input": "hi"}))
    page.check("/v1/responses/{response_id}", http.delete(f"{PATH}/{made['id']}"))
    page.check("/v1/responses/{response_id}", http.get(f"{PATH}/{made['id']}"))
    service.scripts = [HELLO]
    for path, name in [(PATH, "ResponseRequest"), (f"{PATH}/input_tokens", "InputTokensRequest")]:
        body = page.page["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        for example in body["examples"].values():
            page.validate({"$ref": f"#/components/schemas/{name}"}, example["value"])
            assert http.post(path, json=example["value"]).status_code == 200
        properties = page.page["components"]["schemas"][name]["properties"]
        assert all(field["description"] for field in properties.values())
        optional = dict.fromkeys(properties.keys() - {"input"})
        assert http.post(path, json={"input": "hi", **optional}).status_code == 200
