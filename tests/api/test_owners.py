"""What a client leaves on the server belongs to its API key: to any other key it does not exist."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.api.app import create_app
from millstream.service.store.files import RecordFiles
from millstream.service.store.folder import RecordFolder
from millstream.service.store.memory import MemoryRecords
from millstream.service.store.seal import SecretKeySeal
from millstream.types import Delta
from support.responses import STOP, Script, Scripts
from support.services import services

KEYS = ("alice-key", "bob-key")
PATH = "/v1/responses"
NOWHERE = f"resp_{'0' * 32}"
THOUGHT: Script = ((Delta(0, reasoning="a secret plan"),), (Delta(0, "Hello", finish_reason=STOP),))

OF_THE_SERVER = "of the server: the same for every key"
OF_ITS_OWNER = "of its owner: `test_nobody_else_finds_a_response` asks for it with another key"
WHOSE = {
    "/api/blobs/{digest}": "of nobody: it is refused",
    "/page/{name:path}": OF_THE_SERVER,
    "/v1/models/{model:path}": OF_THE_SERVER,
    "/v1/models/{model:model_id}": OF_THE_SERVER,
    "/v1/models/{model:model_id}/load": OF_THE_SERVER,
    "/v1/models/{model:model_id}/unload": OF_THE_SERVER,
    "/v1/models/{model:model_id}/cache/clear": OF_THE_SERVER,
    "/v1/responses/{response_id:response_id}": OF_ITS_OWNER,
    "/v1/responses/{response_id:response_id}/cancel": OF_ITS_OWNER,
    "/v1/responses/{response_id:response_id}/input_items": OF_ITS_OWNER,
}
"""Every path with a name in it. Realtime sessions and their items can be named only on their own connection."""
NAMED_IN_BODIES = {
    "previous_response_id": OF_ITS_OWNER,
    "id": "an id that the client gives, as of a call or of an item of its own conversation; voices are of the server",
    "tool_call_id": "an id in the conversation that the client sends",
    "tool_use_id": "an id in the conversation that the client sends",
    "user_profile_id": "a label that nothing is looked up by",
    "workspace_id": "a label that nothing is looked up by",
}


def routes_of(router: Any) -> Iterator[str]:
    for route in router.routes:
        if (inner := getattr(route, "original_router", None)) is not None:
            yield from routes_of(inner)
        elif (path := getattr(route, "path", None)) is not None:
            yield path


def ids_of(document: dict[str, Any], schema: Any, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """The names of all fields of a request that may name something."""
    if isinstance(schema, list):
        for each in schema:
            yield from ids_of(document, each, seen)
    elif isinstance(schema, dict):
        if (name := str(schema.get("$ref", "")).rpartition("/")[2]) and name not in seen:
            yield from ids_of(document, document["components"]["schemas"][name], seen | {name})
        yield from (each for each in schema.get("properties", {}) if each == "id" or each.endswith("_id"))
        for each in schema.values():
            yield from ids_of(document, each, seen)


def test_every_route_with_an_id_says_whose_it_is() -> None:
    """A new one needs a line in `WHOSE`, and if it is its owner's, a request in the tests below."""
    app = create_app(services(Scripts()), body_limit=1000, api_keys=KEYS)
    assert {path for path in routes_of(app) if "{" in path} == set(WHOSE)
    document = app.openapi()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    found = {name for each in operations for name in ids_of(document, each.get("requestBody"))}
    assert found == set(NAMED_IN_BODIES)


class Clients:
    """Alice and Bob at two servers that share a store, and somebody without a key at a third."""

    def __init__(self, service: Scripts, ports: list[int]) -> None:
        self.service = service
        here, there, keyless = (f"http://127.0.0.1:{port}" for port in ports)
        self.alice, self.bob = (httpx.Client(base_url=here, headers={"x-api-key": key}, timeout=20) for key in KEYS)
        self.alice_there, self.bob_there = (
            httpx.Client(base_url=there, headers={"authorization": f"Bearer {key}"}, timeout=20) for key in KEYS
        )
        self.keyless = httpx.Client(base_url=keyless, timeout=20)

    @property
    def all(self) -> list[httpx.Client]:
        return [self.alice, self.bob, self.alice_there, self.bob_there, self.keyless]


@pytest.fixture
def clients(shared: Clients) -> Clients:
    shared.service.reset(THOUGHT)
    return shared


@pytest.fixture(scope="module", params=["memory", "folder"])
def shared(request, serve_module, tmp_path_factory) -> Iterator[Clients]:
    service = Scripts()
    folder: Path = tmp_path_factory.mktemp("records")
    with ThreadPoolExecutor(1) as worker:
        memory = MemoryRecords(max_bytes=10**6, max_age=60.0)

        def app(keys: tuple[str, ...]) -> Any:
            files = RecordFiles(RecordFolder(folder, max_bytes=10**7, max_age=60.0), worker, memory)
            records = memory if request.param == "memory" else files
            own = services(service, records=records, seal=SecretKeySeal(b"k" * 32))
            return create_app(own, body_limit=100_000, api_keys=keys)

        with serve_module(app(KEYS)) as here, serve_module(app(KEYS)) as there, serve_module(app(())) as keyless:
            found = Clients(service, [here, there, keyless])
            yield found
            for client in found.all:
                client.close()


def create(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"input": "hi", **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def asked(client: httpx.Client, name: str, item: str) -> list[tuple[int, str]]:
    """What each way to ask for a response, or for an item of it, is answered with; ids left out."""
    answers = [
        client.get(f"{PATH}/{name}"),
        client.get(f"{PATH}/{name}?stream=true"),
        client.get(f"{PATH}/{name}/input_items"),
        client.post(f"{PATH}/{name}/cancel"),
        client.delete(f"{PATH}/{name}"),
        client.post(PATH, json={"input": "hi", "previous_response_id": name}),
        client.post(f"{PATH}/input_tokens", json={"input": "hi", "previous_response_id": name}),
        client.post(PATH, json={"input": [{"type": "item_reference", "id": item}]}),
    ]
    named = re.compile(f"{name}|{item}|req_[0-9a-f]+")
    return [(each.status_code, named.sub("ID", each.text)) for each in answers]


@pytest.mark.parametrize("state", ["done", "running"])
def test_nobody_else_finds_a_response(clients: Clients, state: str) -> None:
    if state == "running":
        clients.service.gate = threading.Event()
    response = create(clients.alice, background=state == "running")
    name, item = response["id"], f"msg_{response['id'].removeprefix('resp_')}000001"  # its message; the reasoning is 0
    others = [clients.bob, clients.bob_there, clients.keyless]
    for client in others:
        unknown = asked(client, NOWHERE, f"msg_{'0' * 32}000000")
        assert [status for status, _ in unknown] == [404] * 8
        assert asked(client, name, item) == unknown
    if state == "running":
        assert clients.alice.get(f"{PATH}/{name}").json()["status"] in ("queued", "in_progress"), (
            "Bob did not cancel it"
        )
        cancelled = clients.alice.post(f"{PATH}/{name}/cancel").json()
        assert cancelled["status"] == "cancelled"
        assert not [status for client in others for status, _ in asked(client, name, item) if status != 404]
    for client in (clients.alice, clients.alice_there):
        assert client.get(f"{PATH}/{name}").json()["id"] == name
        assert client.get(f"{PATH}/{name}/input_items").json()["data"]
    if state == "done":
        create(clients.alice_there, previous_response_id=name)
        create(clients.alice, input=[{"type": "item_reference", "id": item}])
    assert clients.alice_there.delete(f"{PATH}/{name}").status_code == 200
    assert clients.alice.get(f"{PATH}/{name}").status_code == 404


def test_what_came_without_a_key_stays_without_one(clients: Clients) -> None:
    """A server that gets keys later does not show what it holds to whoever has one."""
    name = create(clients.keyless)["id"]
    assert clients.keyless.get(f"{PATH}/{name}").status_code == 200
    for client in (clients.alice, clients.bob):
        assert client.get(f"{PATH}/{name}").status_code == 404


def test_sealed_reasoning_opens_for_its_owner_alone(clients: Clients) -> None:
    sealed = create(clients.alice, include=["reasoning.encrypted_content"])["output"][0]["encrypted_content"]
    message = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    blocks = clients.alice.post("/v1/messages", json=message).json()["content"]
    signature = next(block["signature"] for block in blocks if block["type"] == "thinking")

    def read(client: httpx.Client) -> list[bool]:
        """Whether the model saw the thought: in the Responses API, and in Anthropic's."""
        item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
        thinking = {"type": "thinking", "thinking": "", "signature": signature}
        turn = {"role": "assistant", "content": "x"}
        create(client, input=[{"role": "user", "content": "a"}, item, turn, {"role": "user", "content": "b"}])
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [thinking, {"type": "text", "text": "x"}]},
            {"role": "user", "content": "b"},
        ]
        assert client.post("/v1/messages", json=message | {"messages": messages}).status_code == 200
        return ["a secret plan" in repr(request.prompts) for request in clients.service.requests[-2:]]

    assert read(clients.alice) == read(clients.alice_there) == [True, True]
    assert read(clients.bob) == read(clients.keyless) == [False, False]
