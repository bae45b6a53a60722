"""The content of `messages`, and what the service gets of it."""

from __future__ import annotations

import pytest

from millstream.types import MediaPart

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXT_PART = {"type": "text", "text": "a"}


def post(http, messages):
    return http.post("/v1/chat/completions", json={"messages": messages})


@pytest.mark.parametrize(
    "message, passed_on",
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
def test_passed_on(http, service, message, passed_on):
    response = post(http, [message])
    assert response.status_code == 200, response.text
    assert service.requests[0].prompts[0].messages == (passed_on,)


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
        ([USER | {"name": []}], "invalid_request", "messages[0].name"),
        ([USER | {"tool_calls": [CALL | {"id": []}]}], "invalid_request", "messages[0].tool_calls[0].id"),
        ([USER | {"tool_calls": [CALL | {"id": 5}]}], "invalid_request", "messages[0].tool_calls[0].id"),
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


PICTURE = {"type": "image_url", "image_url": {"url": "https://host/a.png", "detail": "low"}}


def test_media_are_passed_on_in_order(http, service):
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    plain = {"type": "image_url", "image_url": "https://host/b.png"}
    messages = [
        {"role": "user", "content": [TEXT_PART, PICTURE, sound]},
        USER,
        {"role": "user", "content": [plain, video]},
    ]
    assert post(http, messages).status_code == 200
    prompt = service.requests[0].prompts[0]
    assert prompt.media == (
        MediaPart("image", "https://host/a.png", "messages[0].content[1]"),
        MediaPart("audio", "data:audio/wav;base64,AAAA", "messages[0].content[2]"),
        MediaPart("image", "https://host/b.png", "messages[2].content[0]"),
        MediaPart("video", "data:video/mp4;base64,AAAA", "messages[2].content[1]"),
    )
    assert [part["type"] for part in prompt.messages[0]["content"]] == ["text", "image", "audio"]
    assert prompt.messages[1]["content"] == "x"


@pytest.mark.parametrize(
    "part, code, param",
    [
        ({"type": "image_url"}, "invalid_request", ".image_url"),
        ({"type": "image_url", "image_url": {}}, "invalid_request", ".image_url"),
        ({"type": "image_url", "image_url": {"url": ""}}, "invalid_request", ".image_url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "invalid_request", ".image_url"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}, "invalid_request", ".image_url.detail"),
        ({"type": "video_url", "video_url": None}, "invalid_request", ".video_url"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "invalid_request", ".input_audio"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "ogg"}}, "invalid_request", ".input_audio"),
        ({"type": "input_audio", "input_audio": "AAAA"}, "invalid_request", ".input_audio"),
        ({"type": "input_image", "image_url": "x"}, "unsupported_parameter", ""),
        ({"type": "file", "file": {"file_id": "x"}}, "unsupported_parameter", ""),
    ],
)
def test_incomplete_media(http, service, part, code, param):
    response = post(http, [USER, {"role": "user", "content": [TEXT_PART, part]}])
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code)
    assert error["param"] == "messages[1].content[1]" + param
    assert service.requests == []
