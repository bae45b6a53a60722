"""Numbers of any size and form pass through every dialect unchanged, in and out, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.scripted_server import ScriptedServer, scripted_server

MARK = 424242
"""Stands for the number where a body is made by `json.dumps`, which would change it."""
PARAMETERS = {"type": "object", "properties": {"n": {"type": "number", "default": MARK}}}
FUNCTION = {"name": "f", "description": "", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}

numbers = st.one_of(
    st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
    st.integers(-(2**70), 2**70).map(str),
    st.integers(300, 400).map(lambda digits: "7" * digits),
)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedServer, httpx.Client]]:
    folder = tmp_path_factory.mktemp("numbers") / "tiny"
    with scripted_server(folder) as subject, httpx.Client(base_url=subject.url, timeout=60) as http:
        yield subject, http


def post(http: httpx.Client, path: str, number: str, **body: Any) -> str:
    """Sends a body with the number at each mark. Returns the answer as it came."""
    content = json.dumps({"model": "tiny", **body}).replace(str(MARK), number)
    reply = http.post(path, content=content, headers={"anthropic-version": "2023-06-01"})
    assert reply.status_code == 200, reply.text
    return reply.text


def asked(http: httpx.Client, number: str, *, stream: bool) -> list[str]:
    """The answers of the four dialects to a conversation in which the assistant has called with the number. The first
    two take the arguments as text, the others as an object."""
    text = f'{{"n": {number}}}'
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": text}}
    ollama = {"function": {"name": "f", "arguments": {"n": MARK}}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "r"}
    user = {"role": "user", "content": "q"}
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {"n": MARK}}
    returned = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "r"}]}
    items = [
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": text},
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
    ]
    return [
        post(
            http,
            "/v1/chat/completions",
            number,
            messages=[user, {"role": "assistant", "tool_calls": [call]}, result],
            tools=[TOOL],
            stream=stream,
        ),
        post(
            http, "/v1/responses", number, input=[user, *items], tools=[{"type": "function", **FUNCTION}], stream=stream
        ),
        post(
            http,
            "/v1/messages",
            number,
            messages=[user, {"role": "assistant", "content": [use]}, returned],
            tools=[{"name": "f", "input_schema": PARAMETERS}],
            max_tokens=500,
            stream=stream,
        ),
        post(
            http,
            "/api/chat",
            number,
            messages=[user, {"role": "assistant", "content": "", "tool_calls": [ollama]}, result],
            tools=[TOOL],
            stream=stream,
        ),
    ]


def streamed_arguments(answer: str) -> str:
    """The arguments in the pieces that Anthropic's stream has."""
    pieces = re.findall(r'"partial_json":("(?:[^"\\]|\\.)*")', answer)
    return "".join(json.loads(piece) for piece in pieces)


@settings(max_examples=8, deadline=None)
@example("18446744073709551616")
@example("-9223372036854775809")
@example("1e400")
@example("1E5")
@example("-0.0")
@example("1.10")
@example("0.1e-500")
@given(number=numbers)
def test_numbers_of_calls_and_schemas(scripted: tuple[ScriptedServer, httpx.Client], number: str) -> None:
    server, http = scripted
    server.answer = f'<tool_call>\n{{"name": "f", "arguments": {{"n": {number}}}}}\n</tool_call>'
    for stream in (False, True):
        server.prompts.clear()
        chat, responses, messages, ollama = asked(http, number, stream=stream)
        for prompt, as_text in zip(server.prompts, (True, True, False, False), strict=True):
            default, argument = re.findall(r'"(?:default|n)": ([-+.0-9eE]+)', prompt)
            assert Decimal(default) == Decimal(argument) == Decimal(number)
            assert not as_text or argument == number
        escaped = json.dumps(f'{{"n": {number}}}')[1:-1]
        assert stream or escaped in chat
        assert escaped in responses
        assert (
            f'{{"n": {number}}}' == streamed_arguments(messages) if stream else f'"input":{{"n":{number}}}' in messages
        )
        assert f'"arguments":{{"n":{number}}}' in ollama
    stored = http.get(f"/v1/responses/{re.findall(r'resp_[0-9a-f]+', responses)[0]}").text
    assert Decimal(re.findall(r'"default":([-+.0-9eE]+)', stored)[0]) == Decimal(number)


def test_a_number_out_of_range_is_quoted_as_it_was_sent(scripted: tuple[ScriptedServer, httpx.Client]) -> None:
    _, http = scripted
    for field, number in (("max_tokens", "1" * 30), ("temperature", "1e400"), ("top_k", "18446744073709551616")):
        content = json.dumps({"prompt": "x", field: MARK}).replace(str(MARK), number)
        reply = http.post("/v1/completions", content=content)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == field
        assert number in reply.json()["error"]["message"]
