"""Input items of the Responses API: the messages that they become, which are those of the chat API."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millstream.api.app import create_app
from millstream.api.openai.responses.conversation import without_oldest
from millstream.service.store.seal import SecretKeySeal
from millstream.types import ChatPrompt, Delta, GenerationRequest, MediaPart
from support.responses import CALLS, HELLO, Scripts, call, script
from support.services import services

PATH = "/v1/responses"
PIXEL = "data:image/png;base64,iVBORw0KGgo="
SEAL = SecretKeySeal(b"k" * 32)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CUSTOM = {"type": "custom", "name": "c"}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def service() -> Scripts:
    return Scripts()


@pytest.fixture(scope="module")
def http(service, serve_module) -> Iterator[httpx.Client]:
    app = create_app(services(service), body_limit=1_000_000)
    with serve_module(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def fresh(service) -> None:
    service.reset()


def text(content: str, kind: str = "input_text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": content}]


def fn(call_id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def sent(http: httpx.Client, service: Scripts, items: object, **more: object) -> list[dict[str, Any]]:
    response = http.post(PATH, json={"input": items, **more})
    assert response.status_code == 200, response.text
    return service.messages


USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "42"}
TOOL_MESSAGE = {"role": "tool", "content": "42", "tool_call_id": "1"}
SHELL = {"type": "local_shell_call", "call_id": "1", "action": {"command": ["ls"]}, "status": "completed"}

CASES: list[tuple[str, Any, list[dict[str, Any]]]] = [
    ("a text", "hi", [USER]),
    ("a short message", [USER], [USER]),
    (
        "a message with parts",
        [{"type": "message", "role": "user", "content": [*text("a"), *text("b")]}],
        [{"role": "user", "content": "ab"}],
    ),
    ("developer", [{"role": "developer", "content": "x"}, USER], [{"role": "system", "content": "x"}, USER]),
    ("system", [USER, {"role": "system", "content": "x"}], [USER, {"role": "system", "content": "x"}]),
    (
        "an answer",
        [USER, {"role": "assistant", "content": text("a", "output_text")}],
        [USER, {"role": "assistant", "content": "a"}],
    ),
    (
        "a refusal",
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [{"role": "assistant", "content": "no"}],
    ),
    (
        "one turn is one message",
        [
            USER,
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "s"}],
                "content": text("why", "reasoning_text"),
            },
            {"role": "assistant", "content": "let me see"},
            CALL,
            CALL | {"call_id": "2"},
            OUTPUT,
            OUTPUT | {"call_id": "2"},
        ],
        [
            USER,
            {
                "role": "assistant",
                "content": "let me see",
                "reasoning_content": "why",
                "tool_calls": [fn("1"), fn("2")],
            },
            TOOL_MESSAGE,
            TOOL_MESSAGE | {"tool_call_id": "2"},
        ],
    ),
    (
        "a summary is no reasoning",
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, USER],
        [USER],
    ),
    ("reasoning of another server", [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, USER], [USER]),
    (
        "sealed reasoning",
        [
            {"type": "reasoning", "summary": [], "encrypted_content": SEAL.seal("why")},
            {"role": "assistant", "content": "a"},
        ],
        [{"role": "assistant", "content": "a", "reasoning_content": "why"}],
    ),
    (
        "two answers in a row are two messages",
        [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
    ),
    (
        "text after a call belongs to its turn",
        [{"role": "assistant", "content": "a"}, CALL, {"role": "assistant", "content": "b"}, OUTPUT],
        [{"role": "assistant", "content": "ab", "tool_calls": [fn("1")]}, TOOL_MESSAGE],
    ),
    (
        "a call without text",
        [CALL, OUTPUT],
        [{"role": "assistant", "content": None, "tool_calls": [fn("1")]}, TOOL_MESSAGE],
    ),
    (
        "a namespace",
        [CALL | {"namespace": "mcp__x__"}, OUTPUT],
        [{"role": "assistant", "content": None, "tool_calls": [fn("1", "mcp__x__f")]}, TOOL_MESSAGE],
    ),
    (
        "a custom tool",
        [
            {"type": "custom_tool_call", "call_id": "1", "name": "c", "input": 'a"é'},
            {"type": "custom_tool_call_output", "call_id": "1", "output": text("42")},
        ],
        [{"role": "assistant", "content": None, "tool_calls": [fn("1", "c", '{"input": "a\\"é"}')]}, TOOL_MESSAGE],
    ),
    (
        "hosted tools of the past are skipped",
        [USER, {"type": "web_search_call", "id": "ws_1", "status": "completed"}, {"role": "assistant", "content": "a"}],
        [USER, {"role": "assistant", "content": "a"}],
    ),
    (
        "a local shell",
        [SHELL, {"type": "local_shell_call_output", "call_id": "1", "output": "42"}],
        [
            {"role": "assistant", "content": None, "tool_calls": [fn("1", "local_shell", '{"command": ["ls"]}')]},
            TOOL_MESSAGE,
        ],
    ),
    (
        "calls of MCP servers",
        [
            {"type": "mcp_list_tools", "id": "l", "server_label": "wiki", "tools": []},
            {"type": "mcp_call", "id": "1", "server_label": "wiki", "name": "f", "arguments": "{}", "output": "42"},
            {"role": "assistant", "content": "a"},
        ],
        [
            {"role": "assistant", "content": None, "tool_calls": [fn("1", "wiki__f")]},
            TOOL_MESSAGE,
            {"role": "assistant", "content": "a"},
        ],
    ),
]


for nothing in ("", None, {}, "{}"):
    CASES.append(
        (
            f"a call without arguments: {nothing!r}",
            [{"type": "function_call", "call_id": "1", "name": "f", "arguments": nothing}],
            [{"role": "assistant", "content": None, "tool_calls": [fn("1", "f")]}],
        )
    )


@pytest.mark.parametrize("items, expected", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_items_become_the_messages_of_the_chat_api(http, service, items, expected):
    assert sent(http, service, items) == expected


def test_instructions_are_a_system_message_at_the_beginning(http, service):
    found = sent(http, service, [{"role": "developer", "content": "d"}, USER], instructions="i")
    assert found == [{"role": "system", "content": "i"}, {"role": "system", "content": "d"}, USER]


def test_images_and_files(http, service):
    data = base64.b64encode("größe".encode()).decode()
    parts = [
        *text("look: "),
        {"type": "input_image", "image_url": PIXEL, "detail": "auto"},
        {"type": "input_file", "filename": "a.txt", "file_data": f"data:text/plain;base64,{data}"},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    ]
    (message,) = sent(http, service, [{"role": "user", "content": parts}])
    assert message["content"] == [
        {"type": "text", "text": "look: "},
        {"type": "image", "media": MediaPart("image", PIXEL, "input[0].content[1]")},
        {"type": "text", "text": "a.txt:\ngröße\n"},
        {"type": "audio", "media": MediaPart("audio", "data:audio/wav;base64,UklGRg==", "input[0].content[3]")},
    ]
    output = {"type": "function_call_output", "call_id": "1", "output": [parts[1]]}
    _, message = sent(http, service, [CALL, output])
    assert message["content"] == [{"type": "image", "media": MediaPart("image", PIXEL, "input[1].output[0]")}]


def test_tools_of_the_input(http, service):
    sent(http, service, [{"type": "additional_tools", "role": "developer", "tools": [TOOL]}, USER])
    assert list(service.requests[0].tools.schemas) == ["f"]


def test_the_same_conversation_as_by_the_chat_api(http, service):
    """Also the turns that the server itself wrote, sent back as items and as a message."""
    reply = script(Delta(0, reasoning="hm"), Delta(0, "see"), *call(0, "f", '{"a": 1}'), end=CALLS)
    service.scripts = [reply]
    include = ["reasoning.encrypted_content"]
    items = http.post(PATH, json={"input": "hi", "tools": [TOOL], "include": include}).json()["output"]
    for item in items:
        item.pop("content", None) if item["type"] == "reasoning" else None
    result = {"type": "function_call_output", "call_id": "call_0", "output": "42"}
    here = sent(http, service, [USER, *items, result], tools=[TOOL], instructions="i")
    mine = service.requests[-1]
    chat = {"messages": [USER], "tools": [CHAT_TOOL]}
    message = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]
    history = [{"role": "system", "content": "i"}, USER, message]
    history.append({"role": "tool", "tool_call_id": "call_0", "content": "42"})
    assert http.post("/v1/chat/completions", json=chat | {"messages": history}).status_code == 200
    theirs = service.requests[-1]
    assert service.messages == here
    assert (mine.tools, mine.thinking, mine.grammar) == (theirs.tools, theirs.thinking, theirs.grammar)


def test_the_same_conversation_by_previous_response_id(http, service):
    reply = script(Delta(0, reasoning="hm"), Delta(0, "see"), *call(0, "f", '{"a": 1}'), end=CALLS)
    service.scripts = [reply, HELLO]
    first = http.post(PATH, json={"input": "hi", "tools": [TOOL], "instructions": "one"}).json()
    result = {"type": "function_call_output", "call_id": "call_0", "output": "42"}
    body = {"input": [result], "tools": [TOOL], "instructions": "two", "previous_response_id": first["id"]}
    second = http.post(PATH, json=body).json()
    assert second["previous_response_id"] == first["id"]
    assert service.messages == [
        {"role": "system", "content": "two"},  # the instructions are not carried over
        USER,
        {
            "role": "assistant",
            "content": "see",
            "reasoning_content": "hm",
            "tool_calls": [fn("call_0", "f", '{"a": 1}')],
        },
        {"role": "tool", "content": "42", "tool_call_id": "call_0"},
    ]
    third = http.post(PATH, json={"input": "go on", "previous_response_id": second["id"]}).json()
    assert service.messages[-2:] == [
        {"role": "assistant", "content": "Hello world"},
        {"role": "user", "content": "go on"},
    ]
    assert third["status"] == "completed" and len(service.messages) == 5


def test_an_answer_of_nothing_is_a_turn(http, service):
    """Otherwise two turns of the user would stand together, which many templates refuse."""
    service.scripts = [script(), HELLO]
    first = http.post(PATH, json={"input": "hi"}).json()
    assert http.post(PATH, json={"input": "hi", "previous_response_id": first["id"]}).status_code == 200
    turns = [USER, {"role": "assistant", "content": ""}, USER]
    assert service.messages == turns
    assert sent(http, service, [USER, *first["output"], USER]) == turns


def test_references_to_stored_items(http, service):
    service.scripts = [script(Delta(0, reasoning="hm"), *call(0, "f", "{}"), end=CALLS)]
    first = http.post(PATH, json={"input": "hi", "tools": [TOOL]}).json()
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    result = {"type": "function_call_output", "call_id": "call_0", "output": "42"}
    found = sent(http, service, [USER, *references, result], tools=[TOOL])
    assert found[1] == {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [fn("call_0")]}
    second = http.post(PATH, json={"input": [USER, {"id": first["output"][0]["id"]}], "tools": [TOOL]}).json()
    items = http.get(f"{PATH}/{second['id']}/input_items?order=asc").json()["data"]
    assert items[1] == first["output"][0]  # stored as what it refers to


@pytest.mark.parametrize("wanted", ["msg_x", f"msg_{'0' * 32}000000"])
def test_a_reference_to_nothing(http, service, wanted):
    response = http.post(PATH, json={"input": [USER, {"type": "item_reference", "id": wanted}]})
    assert response.status_code == 404 and response.json()["error"]["param"] == "input[1]"
    assert not service.requests


def test_a_conversation_goes_on_without_reasoning_that_is_not_stored(http, service):
    reference = {"type": "item_reference", "id": "rs_1"}
    response = http.post(PATH, json={"input": [USER, reference, {"role": "assistant", "content": "a"}]}).json()
    assert service.messages == [USER, {"role": "assistant", "content": "a"}]
    http.post(PATH, json={"input": "go on", "previous_response_id": response["id"]})
    assert len(service.messages) == 4


def test_truncation_leaves_out_the_oldest_turns(http, service):
    service.limit = 100
    turns = [
        {"role": role, "content": f"{index:02} " + "x" * 17} for index in range(10) for role in ("user", "assistant")
    ]
    items = [{"role": "system", "content": "be kind"}, *turns, USER]
    whole = http.post(PATH, json={"input": items, "max_output_tokens": 20})
    assert whole.status_code == 400 and whole.json()["error"]["code"] == "context_length_exceeded"
    found = sent(http, service, items, truncation="auto", max_output_tokens=20)
    assert found == [items[0], *turns[-3:], USER]
    assert len(service.counted) < 8
    service.limit = 5
    assert http.post(PATH, json={"input": items, "truncation": "auto"}).status_code == 400


def test_no_shorter_form_begins_with_an_output():
    tool, answer = {"role": "tool", "content": "x"}, {"role": "assistant", "content": "a"}
    forms = without_oldest([{"role": "system", "content": "s"}, USER, answer, tool, tool, USER])
    assert [[message["role"] for message in form] for form in forms] == [
        ["system", "assistant", "tool", "tool", "user"],
        ["system", "user"],
    ]


def test_the_tokens_of_an_input(http, service):
    body = {"input": [USER], "instructions": "be kind", "tools": [TOOL, CUSTOM], "model": "m"}
    response = http.post(f"{PATH}/input_tokens", json=body)
    assert response.json() == {"object": "response.input_tokens", "input_tokens": 9}
    (request,) = service.counted
    http.post(PATH, json=body)
    assert isinstance(request, GenerationRequest) and isinstance(request.prompts[0], ChatPrompt)
    made = service.requests[0]
    assert (request.prompts, request.tools, request.model) == (made.prompts, made.tools, made.model)
