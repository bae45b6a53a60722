"""What may stand in `messages`, and what the service gets of it."""

from __future__ import annotations

import pytest

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXT_PART = {"type": "text", "text": "a"}


def post(http, messages):
    return http.post("/v1/chat/completions", json={"messages": messages})


@pytest.mark.parametrize(
    "message, handed_on",
    [
        ({"role": "system", "content": "s"}, {"role": "system", "content": "s"}),
        ({"role": "developer", "content": "s"}, {"role": "system", "content": "s"}),
        ({"role": "user", "content": "", "name": "Ann"}, {"role": "user", "content": "", "name": "Ann"}),
        ({"role": "user", "content": [TEXT_PART, TEXT_PART]}, {"role": "user", "content": "aa"}),
        (
            {"role": "user", "content": [TEXT_PART | {"cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": "a"},
        ),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ),
        ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "content": None, "tool_calls": [CALL]}),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
        ),
        (
            {
                "role": "assistant",
                "content": "a",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "tool_calls": None,
            },
            {"role": "assistant", "content": "a"},
        ),
        (
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ),
    ],
)
def test_handed_on(http, service, message, handed_on):
    response = post(http, [message])
    assert response.status_code == 200, response.text
    assert service.requests[0].prompts[0].messages == (handed_on,)


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "messages, code, param",
    [
        ([], "invalid_request", "messages"),
        ("hi", "invalid_request", "messages"),
        ({}, "invalid_request", "messages"),
        (["hi"], "invalid_request", "messages[0]"),
        ([USER, {"content": "x"}], "invalid_request", "messages[1].role"),
        ([{"role": "robot", "content": "x"}], "invalid_request", "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "invalid_request", "messages[0].role"),
        ([{"role": "user"}], "invalid_request", "messages[0].content"),
        ([{"role": "user", "content": None}], "invalid_request", "messages[0].content"),
        ([{"role": "tool", "content": None}], "invalid_request", "messages[0].content"),
        ([{"role": "user", "content": 5}], "invalid_request", "messages[0].content"),
        ([{"role": "user", "content": []}], "invalid_request", "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "invalid_request", "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "invalid_request", "messages[0].content[0]"),
        ([{"role": "user", "content": [TEXT_PART, {"type": "odd"}]}], "invalid_request", "messages[0].content[1]"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "invalid_request", "messages[0].content[0]"),
        ([USER | {"name": 5}], "invalid_request", "messages[0].name"),
        ([USER | {"tool_calls": "x"}], "invalid_request", "messages[0].tool_calls"),
        ([USER | {"tool_calls": ["x"]}], "invalid_request", "messages[0].tool_calls"),
        ([USER | {"function_call": {"name": "f"}}], "unsupported_parameter", "messages[0].function_call"),
        ([USER | {"colour": "red"}], "unknown_parameter", "messages[0].colour"),
    ],
)
def test_refused(http, service, messages, code, param):
    response = post(http, messages)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert service.requests == []


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_other_than_text_is_not_supported(http, kind):
    response = post(http, [USER, USER, {"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}])
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("unsupported_parameter", "messages[2].content[0]")
    assert error["message"].startswith("This model takes text only")
