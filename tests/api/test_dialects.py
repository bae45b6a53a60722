"""A second, tiny dialect beside OpenAI's: it has its own errors, framing, first and last chunk, and the common code
needs no change for it."""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

import millstream.api
from millstream import errors
from millstream.api.app import DIALECTS, create_app
from millstream.api.body import read_body
from millstream.api.dialect import Dialect, DialectDocs, Dialects
from millstream.api.error_docs import SERVICE, ErrorDocs
from millstream.api.errors import ErrorFormat, error_headers, json_response
from millstream.api.http1.connections import Connections
from millstream.api.http1.limits import HttpLimits
from millstream.api.http1.protocol import LimitedProtocol
from millstream.api.openapi import documented
from millstream.api.render import merged, per_choice
from millstream.api.response import Responder
from millstream.api.stream import StreamFormat
from millstream.errors import BadRequest, MillstreamError
from millstream.types import Delta, FinishReason, GenerationRequest, TextPrompt, Usage
from support.openapi import references
from support.services import services

API = Path(millstream.api.__file__).parent
KEY = "a-key"
VERSION = {"tiny-version": "1"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


# The dialect


class TinyError(BaseModel):
    oops: str


class TinyReply(BaseModel):
    text: str
    reason: str
    stopped_by: str | None


def error_body(error: MillstreamError) -> bytes:
    return line({"oops": error.message})


def line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


class TinyRenderer:
    """Renders JSON, or a stream of JSON lines: one that opens it, the texts, and one that says how it ended."""

    stream_format = StreamFormat(b"application/x-ndjson", ping=b"\n")

    def __init__(self, model: str) -> None:
        self._model = model
        self._last = Delta(0)

    def opening(self, usage: Usage) -> bytes:
        return line({"model": self._model, "prompt_tokens": usage.prompt_tokens})

    def chunks(self, batch: Sequence[Delta]) -> bytes:
        parts = []
        for delta in merged(batch):
            self._last = delta
            parts.append(line({"text": delta.text}) if delta.text else b"")
        return b"".join(parts)

    def ending(self, usage: Usage) -> bytes:
        return line({"done": True, "tokens": usage.completion_tokens, **how_it_ended(self._last)})

    def failure(self, error: MillstreamError) -> bytes:
        return error_body(error)

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        choices = per_choice(deltas)
        return json.dumps({"text": choices[0].text, **how_it_ended(choices[0])}).encode()


def how_it_ended(delta: Delta) -> dict[str, object]:
    return {"reason": delta.finish_reason, "stopped_by": delta.stop_string}


def parse(body: dict[str, object]) -> tuple[GenerationRequest, bool]:
    text, stop = body.get("say"), body.get("until", ())
    if not isinstance(text, str) or not isinstance(stop, list | tuple):
        raise BadRequest("say must be a string.", param="say")
    return GenerationRequest("", (TextPrompt(text),), stop=tuple(stop)), body.get("lines") is True


class VersionedRoute(APIRoute):
    """Matches only requests with the dialect's header: OpenAI has a route at the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if all(name != b"tiny-version" for name, _ in scope["headers"]):
            return Match.NONE, {}
        return super().matches(scope)


def tiny_routes(responder: Responder) -> tuple[APIRouter, ...]:
    own = APIRouter(prefix="/tiny", default_response_class=Response)

    @own.post("/say", openapi_extra=documented(TinyReply, "What was said.", errors=ERROR_DOCS.references(SERVICE)))
    async def say(request: Request) -> Response:
        generation, lines = await read_body(request, parse)
        return responder.respond(generation, TinyRenderer, stream=lines)

    @own.post("/restart")
    async def restart() -> Response:
        return json_response("restarted")

    return (own,)


def tiny_shared_routes(responder: Responder) -> tuple[APIRouter, ...]:
    shared = APIRouter(route_class=VersionedRoute, include_in_schema=False)

    @shared.get("/v1/models")
    async def tiny_models() -> Response:
        return json_response([card.name for card in responder.services.models.models()])

    return (shared,)


def tiny_error_headers(error: MillstreamError) -> dict[str, str]:
    return {**error_headers(error), "tiny-error": error.code}


ERROR_DOCS = ErrorDocs(TinyError, prefix="Tiny", codes=False)
TINY = Dialect(
    name="tiny",
    routes=tiny_routes,
    shared_routes=tiny_shared_routes,
    errors=ErrorFormat(error_body, tiny_error_headers),
    docs=DialectDocs(errors=ERROR_DOCS, responses=(TinyReply,)),
    paths=("/tiny",),
    header=b"tiny-version",
    admin_paths=(re.compile("/tiny/restart"),),
)
BOTH = (*DIALECTS, TINY)


# The app with both dialects


@contextmanager
def client(serve: Any, service: Any, **options: Any) -> Iterator[httpx.Client]:
    app = create_app(services(service), body_limit=1000, dialects=BOTH, **options)
    with serve(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        yield http


@pytest.fixture
def both(serve, service) -> Iterator[httpx.Client]:
    with client(serve, service) as http:
        yield http


def oops(response: httpx.Response, status: int) -> str:
    """The message of an error in the tiny dialect's shape."""
    assert response.status_code == status and response.headers["content-type"] == "application/json"
    assert response.headers["tiny-error"]
    (message,) = response.json().values()
    assert response.json().keys() == {"oops"}
    return message


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(each) for each in response.text.splitlines() if each]


STOPPED = [(Delta(0, "up"),), (Delta(0, " to", finish_reason=FinishReason.STOP, stop_string="END"),)]


def test_a_whole_response(both, service):
    service.steps = STOPPED
    response = both.post("/tiny/say", json={"say": "hi", "until": ["END"]})
    assert response.json() == {"text": "up to", "reason": "stop", "stopped_by": "END"}
    assert service.requests[0].stop == ("END",)


def test_a_stream_has_its_own_framing_first_and_last_chunk(both, service):
    service.steps = STOPPED
    response = both.post("/tiny/say", json={"say": "hi", "lines": True})
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    assert lines(response) == [
        {"model": "org/tiny", "prompt_tokens": 0},
        {"text": "up"},
        {"text": " to"},
        {"done": True, "tokens": 5, "reason": "stop", "stopped_by": "END"},
    ]


def test_the_opening_comes_before_the_first_token(both, service):
    service.steps, service.ends = [], False
    with both.stream("POST", "/tiny/say", json={"say": "hi", "lines": True}) as response:
        arriving = response.iter_raw()
        assert json.loads(next(arriving))["model"] == "org/tiny"
        service.generation().push(None)
        assert json.loads(b"".join(arriving))["done"] is True


def test_pings_are_those_of_the_dialect(serve, service):
    service.steps, service.ends = [], False
    with (
        client(serve, service, ping_seconds=0.01) as http,
        http.stream("POST", "/tiny/say", json={"say": "hi", "lines": True}) as response,
    ):
        arriving = response.iter_raw()
        assert b"model" in next(arriving)
        assert next(arriving).strip(b"\n") == b""
        service.generation().push(None)
        assert b"done" in b"".join(arriving)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_before_the_first_byte(both, service, streamed):
    service.start_error = errors.EngineBusy("full", active=4, waiting=9, retry_after=3)
    response = both.post("/tiny/say", json={"say": "hi", "lines": streamed})
    assert oops(response, 503) == "full" and response.headers["retry-after"] == "3"
    assert response.headers["tiny-error"] == "engine_busy"


def test_an_invalid_request(both):
    assert oops(both.post("/tiny/say", json={"say": 1}), 400) == "say must be a string."
    assert "not valid JSON" in oops(both.post("/tiny/say", content=b"{"), 400)


@pytest.mark.parametrize(
    "error, message", [(errors.StepFailed("bang"), "bang"), (ValueError(), "The server failed on this request.")]
)
def test_an_error_inside_a_stream_is_its_last_line(both, service, error, message):
    service.steps = [(Delta(0, "cut"),), error]
    found = lines(both.post("/tiny/say", json={"say": "hi", "lines": True}))
    assert found[1:] == [{"text": "cut"}, {"oops": message}]


def test_unknown_paths_and_methods_under_its_prefix(both):
    assert "/tiny/nothing" in oops(both.get("/tiny/nothing"), 404)
    response = both.get("/tiny/say")
    assert "POST" in oops(response, 405) and response.headers["allow"] == "OPTIONS, POST"
    for other in ("/tinyish", "/"):
        assert "error" in both.post(other).json(), "a prefix ends at a slash"


def test_middleware_refuses_in_the_dialect_of_the_request(serve, service):
    with client(serve, service, api_keys=(KEY,)) as http:
        response = http.post("/tiny/say", json={"say": "hi"})
        assert "API key" in oops(response, 401) and response.headers["www-authenticate"] == "Bearer"
        assert "1000 bytes" in oops(http.post("/tiny/say", headers={"x-api-key": KEY}, content=b"x" * 2000), 413)
        assert http.post("/v1/completions", json={"prompt": "hi"}).json()["error"]["code"] == "invalid_api_key"
    with client(serve, service, hosts=("mill.example",)) as http:
        assert "--allowed-host" in oops(http.get("/tiny/say", headers={"host": "other.example"}), 403)


def test_a_dialect_has_admin_routes_of_its_own(service):
    app = create_app(services(service), body_limit=1000, dialects=BOTH)

    async def status(client: str) -> int:
        transport = httpx.ASGITransport(app, client=(client, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await http.post("/tiny/restart")).status_code

    assert asyncio.run(status("127.0.0.1")) == 200
    assert asyncio.run(status("192.168.1.9")) == 403


def test_a_header_claims_a_shared_path(both):
    assert both.get("/v1/models", headers=VERSION).json() == ["org/tiny", "plain"]
    assert both.get("/v1/models").json()["object"] == "list"
    assert oops(both.get("/v1/models/none", headers=VERSION), 404)
    assert both.get("/v1/models/none").json()["error"]["code"] == "model_not_found"


def test_a_path_counts_before_a_header():
    table = Dialects(BOTH)
    header = [(b"tiny-version", b"1")]
    for path, headers, name in [
        ("/tiny", [], "tiny"),
        ("/tiny/say", [], "tiny"),
        ("/tinyish", [], "openai"),
        ("/v1/models", [], "openai"),
        ("/v1/models", header, "tiny"),
        ("/v1/chat/completions", header, "openai"),
        ("/v1/completions", header, "openai"),
    ]:
        assert table.of({"path": path, "headers": headers}).name == name


def test_routes_of_openai_are_unaffected(both, service):
    plain = both.post("/v1/chat/completions", json=CHAT).json()
    assert plain["choices"][0]["message"]["content"] == "Hello world"
    stream = both.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.content.startswith(b"data: {") and stream.content.endswith(b"data: [DONE]\n\n")
    service.steps = [(Delta(0, "cut"),), errors.StepFailed("bang")]
    *_, last, end = both.post("/v1/chat/completions", json=CHAT | {"stream": True}).text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_error" and end == ""
    assert both.get("/nowhere").json()["error"]["code"] == "unknown_url"
    assert "stop_string" not in json.dumps(plain)


def test_refusals_before_a_request_have_the_format_that_the_protocol_got(serve, service):
    limits = HttpLimits()
    protocol = functools.partial(
        LimitedProtocol, limits=limits, connections=Connections(limits), error_format=TINY.errors
    )
    app = create_app(services(service), body_limit=1000, dialects=BOTH)
    with serve(app, http=protocol) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"no http\r\n\r\n")
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"tiny-error: invalid_request" in head
    assert json.loads(body).keys() == {"oops"}


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_both_are_in_one_document(service, keys):
    page = create_app(services(service), body_limit=1000, dialects=BOTH, api_keys=keys).openapi()
    alone = create_app(services(service), body_limit=1000, api_keys=keys).openapi()
    assert {"TinyReply", "TinyError"} <= page["components"]["schemas"].keys()
    responses = page["paths"]["/tiny/say"]["post"]["responses"]
    expected = {*map(str, SERVICE), *(["401"] if keys else [])}
    assert {name for name, response in responses.items() if "$ref" in response} == expected
    assert all("TinyError" in response["$ref"] for response in responses.values() if "$ref" in response)
    assert all(alone["paths"][path] == page["paths"][path] for path in alone["paths"])
    for reference in references(page):
        place = page
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


# Who may import a dialect


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_common_code_imports_no_dialect():
    folders = {path.parent for path in API.glob("*/dialect.py")}
    assert API / "openai" in folders
    for path in sorted(API.rglob("*.py")):
        if path == API / "app.py":
            continue
        for folder in folders - set(path.parents):
            name = f"millstream.api.{folder.name}"
            used = {each for each in imported(path) if each == name or each.startswith(f"{name}.")}
            assert not used, f"{path.relative_to(API)} imports {used}"


def test_the_common_code_does_not_name_formats_of_a_dialect():
    for path in (API / "edge.py", API / "response.py", API / "stream.py", API / "errors.py", API / "routing_errors.py"):
        source = path.read_text(encoding="utf-8").lower()
        for word in ("openai", "[done]", "event-stream", "import sse", "api.sse"):
            assert word not in source, f"{path.name} names {word}"
