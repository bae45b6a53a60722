"""Responses of a tiny model validated against /openapi.json; odd JSON gets a documented response below 500."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from millstream.config import ModelSpec, Settings
from support.openapi import Document
from support.server import running
from support.tiers import some

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 4, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def http(servable: Path) -> Iterator[httpx.Client]:
    with (
        running(Settings((ModelSpec(str(servable), name="org/tiny"),), port=0, max_batch=8)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def page(http: httpx.Client) -> Document:
    return Document(http.get("/openapi.json").json())


CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": True, "top_logprobs": 3},
    {"prompt_logprobs": 2},
    {"response_format": RESPONSE_FORMAT, "max_tokens": 40},
    {"stop": ["a", "e"], "max_tokens": 20, "logprobs": True},
]
TEXTS: list[dict[str, Any]] = [
    {},
    {"n": 2, "best_of": 3, "logprobs": 2},
    {"prompt": ["hi", [1, 2, 3]], "echo": True, "logprobs": 2},
    {"echo": True, "max_tokens": 0, "logprobs": 0},
    {"prompt_logprobs": 3, "max_tokens": 0},
    {"guided_choice": ["yes", "no"], "max_tokens": 10},
]


@pytest.mark.parametrize("path, body", [(CHAT_PATH, CHAT | m) for m in CHATS] + [(TEXT_PATH, TEXT | m) for m in TEXTS])
def test_responses_match_the_document(http: httpx.Client, page: Document, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    page.check(path, answer)
    if not body.keys() & {"prompt_logprobs", "best_of"}:
        for options in ({}, {"stream_options": {"include_usage": True}}):
            stream = http.post(path, json=body | options | {"stream": True})
            assert stream.status_code == 200 and stream.text.endswith("data: [DONE]\n\n")
            page.check(path, stream)


@pytest.mark.parametrize(
    "more, status, code",
    [
        ({"prompt": "x" * 600}, 400, "context_length_exceeded"),
        ({"prompt": [10**6]}, 400, "invalid_request"),
        ({"temperature": "hot"}, 400, "invalid_request"),
        ({"suffix": "x"}, 400, "invalid_request"),
        ({"mirostat": 2}, 400, "unsupported_parameter"),
        ({"tempreature": 1}, 400, "unknown_parameter"),
        ({"guided_regex": "("}, 400, "invalid_request"),
        ({"model": "none"}, 404, "model_not_found"),
    ],
)
def test_errors_match_the_document(
    http: httpx.Client, page: Document, more: dict[str, Any], status: int, code: str
) -> None:
    for stream in (False, True):
        answer = http.post(TEXT_PATH, json=TEXT | more | {"stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        page.check(TEXT_PATH, answer)


def test_load_unload_and_clear_cache(http: httpx.Client, page: Document) -> None:
    for action in ("cache/clear", "unload", "unload", "cache/clear", "load", "load"):
        for name in ("org/tiny", "org%2Ftiny"):
            answer = http.post(f"/v1/models/{name}/{action}")
            assert answer.status_code == 200 and answer.json()["id"] == "org/tiny"
            page.check(f"/v1/models/{{model}}/{action}", answer)
        for path in ("/v1/models", "/health", "/metrics"):
            page.check(path, http.get(path))


DEEP = b"[" * 5000 + b"]" * 5000
ODD_VALUES = [
    b'"\\ud800"',
    b'"\\udfff\\ud800"',
    b'"\\u0000"',
    b'"\xed\xa0\x80"',
    b'"\xff"',
    b'""',
    b"NaN",
    b"Infinity",
    b"-1e400",
    b"1e400",
    b"1e-400",
    b"-0.0",
    b"18446744073709551615",
    b"18446744073709551616",
    b"-9223372036854775809",
    b"1" + b"0" * 30,
    b"1" + b"0" * 5000,
    b"1.0",
    b"true",
    b"null",
    b"{}",
    b"[]",
    b"[[]]",
    b"[null]",
    b'{"type":[]}',
    b'{"":""}',
    b'{"type":"function","function":{"name":[]}}',
    DEEP,
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
]
FIELDS = [
    "messages",
    "content",
    "role",
    "tool_calls",
    "prompt",
    "model",
    "temperature",
    "seed",
    "n",
    "stop",
    "logit_bias",
    "stream_options",
    "top_logprobs",
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_choice",
    "guided_grammar",
    "chat_template_kwargs",
    "best_of",
    "unheard_of",
]
IN_A_MESSAGE = {"content", "role", "tool_calls"}


def with_value(field: str, value: bytes) -> tuple[str, bytes]:
    """Returns a path, and a body in which a field has this value, possibly as a duplicate key."""
    name = b'"' + field.encode() + b'":' + value
    if field in IN_A_MESSAGE:
        return CHAT_PATH, b'{"max_tokens":2,"messages":[{"role":"assistant","content":"hi",' + name + b"}]}"
    path = TEXT_PATH if field in ("prompt", "best_of") else CHAT_PATH
    base = b'{"prompt":"hi",' if path == TEXT_PATH else b'{"messages":[{"role":"user","content":"hi"}],'
    return path, base + b'"max_completion_tokens":2,' + name + b"}"


@pytest.mark.parametrize("field", some(FIELDS, FIELDS[::5]))
def test_odd_values(http: httpx.Client, page: Document, field: str) -> None:
    for value in ODD_VALUES:
        path, body = with_value(field, value)
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code < 500, (value[:60], answer.text)
        page.check(path, answer)


ODD_BODIES = [b"", b" ", b"\x00", b"{", b"[]", b"1", b'"x"', b"null", b"\xef\xbb\xbf{}", DEEP, b"a=b&c=d", b"{}{}"]


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data", "", "\xff/;;;=", "a" * 300])
def test_odd_bodies_and_content_types(http: httpx.Client, page: Document, kind: str) -> None:
    for body in ODD_BODIES:
        for path in (CHAT_PATH, TEXT_PATH):
            answer = http.post(path, content=body, headers={"content-type": kind.encode("latin-1")})
            assert answer.status_code == 400, answer.text
            page.check(path, answer)


ODD_IDS = [
    "\x00",
    "a\nb",
    "..",
    "./",
    "a//b",
    " ",
    "ü",
    "\u2028",
    "\ud7ff",
    "%",
    "%2F",
    "load",
    "x" * 2000,
    "?",
    "#",
    "{}",
]


@pytest.mark.parametrize("action", ["", "/load", "/unload", "/cache/clear"])
def test_odd_ids(http: httpx.Client, page: Document, action: str) -> None:
    for name in [*(quote(name, safe="") for name in ODD_IDS), "%ff%fe", "%ed%a0%80", "%zz"]:
        answer = http.request("POST" if action else "GET", f"/v1/models/{name}{action}")
        assert answer.status_code == 404, (name, answer.text)
        page.check(f"/v1/models/{{model}}{action}", answer)
