"""The content of `messages`, and what the service gets of it."""

from __future__ import annotations

import pytest

from millstream.types import MediaPart

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXT_PART = {"type": "text", "text": "a"}
REASONED = {"role": "assistant", "content": "a", "reasoning_content": "r"}
REASONED_NOT = {"role": "assistant", "content": "a"}
USER_EXTRA = {
    "role": "user",
    "content": "x",
    "id": "msg_1",
    "cache_control": {"type": "ephemeral"},
    "colour": "red",
    "tool_calls": "not of a user",
}
UNKNOWN_FIELDS = {
    "parsed": {"a": 1},
    "provider_specific_fields": {"citations": None},
    "id": "msg_1",
    "cache_control": {"type": "ephemeral"},
    "refusal": "",
    "annotations": [{"type": "url_citation"}],
    "audio": None,
    "function_call": None,
    "thinking_blocks": [],
    "images": [],
    "status": "completed",
}


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
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        ({"role": "user"}, {"role": "user", "content": ""}),
        ({"role": "system", "content": []}, {"role": "system", "content": ""}),
        (
            {"role": "tool", "content": None, "tool_call_id": "c1"},
            {"role": "tool", "content": "", "tool_call_id": "c1"},
        ),
        ({"role": "system", "content": [TEXT_PART]}, {"role": "system", "content": "a"}),
        ({"role": "tool", "content": [TEXT_PART, "b"]}, {"role": "tool", "content": "ab"}),
        (
            {"role": "user", "content": [{"text": "b"}, {"type": "text", "text": None}]},
            {"role": "user", "content": "b"},
        ),
        ({"role": "user", "content": [{"type": "input_text", "text": "b"}]}, {"role": "user", "content": "b"}),
        (
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "b"}, {"type": "refusal", "refusal": "c"}],
            },
            {"role": "assistant", "content": "bc"},
        ),
        ({"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": "No."}),
        ({"role": "assistant", "content": "a", "refusal": ""}, {"role": "assistant", "content": "a"}),
        ({"role": "assistant", "content": "a", "reasoning": "r"}, REASONED),
        ({"role": "assistant", "content": "a", "reasoning_content": "r", "reasoning": "other"}, REASONED),
        ({"role": "assistant", "content": "a", "reasoning_content": "", "reasoning": None}, REASONED_NOT),
        (
            {"role": "assistant", "content": "a", "reasoning_details": [{"type": "reasoning.text", "text": "r"}]},
            REASONED,
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "r", "signature": "s"}, TEXT_PART]},
            REASONED,
        ),
        ({"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, TEXT_PART]}, REASONED_NOT),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "call_0_0"}]},
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é"}}}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call_0_0", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
                ],
            },
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "f", "input": "x"}}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"input": "x"}'}}
                ],
            },
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"index": 0, "caller": {"type": "direct"}}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ),
        (USER_EXTRA, {"role": "user", "content": "x"}),
    ],
)
def test_passed_on(http, service, message, passed_on):
    response = post(http, [message])
    assert response.status_code == 200, response.text
    assert service.requests[0].prompts[0].messages == (passed_on,)


@pytest.mark.parametrize("name", UNKNOWN_FIELDS)
def test_fields_that_clients_add_are_ignored(http, service, name):
    message = {"role": "assistant", "content": "a", name: UNKNOWN_FIELDS[name]}
    response = post(http, [message, {"role": "user", "content": "x"}])
    assert response.status_code == 200, response.text
    assert service.requests[0].prompts[0].messages[0] == {"role": "assistant", "content": "a"}


def test_results_in_the_older_form_get_the_ids_of_their_calls(http, service):
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 2}'}},
        {"role": "function", "name": "f", "content": "2"},
    ]
    assert post(http, messages).status_code == 200
    passed = service.requests[0].prompts[0].messages
    assert [message["role"] for message in passed] == ["user", "assistant", "tool", "assistant", "tool"]
    ids = [message["tool_calls"][0]["id"] for message in passed[1::2]]
    assert len(set(ids)) == 2 and [message["tool_call_id"] for message in passed[2::2]] == ids
    assert post(http, messages[:3]).status_code == 200
    assert service.requests[1].prompts[0].messages == passed[:3], "the ids do not depend on what follows"


USER = {"role": "user", "content": "x"}
ASSISTANT = {"role": "assistant", "content": "x"}


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
        ([{"role": "user", "content": 5}], "invalid_request", "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "invalid_request", "messages[0].content[0]"),
        ([{"role": "user", "content": [TEXT_PART, {"type": "odd"}]}], "invalid_request", "messages[0].content[1]"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "invalid_request", "messages[0].content[0]"),
        ([USER | {"name": 5}], "invalid_request", "messages[0].name"),
        ([USER | {"name": []}], "invalid_request", "messages[0].name"),
        ([ASSISTANT | {"tool_calls": [CALL | {"id": []}]}], "invalid_request", "messages[0].tool_calls[0].id"),
        ([ASSISTANT | {"tool_calls": [CALL | {"id": 5}]}], "invalid_request", "messages[0].tool_calls[0].id"),
        ([{"role": "user", "content": [5]}], "invalid_request", "messages[0].content[0]"),
        ([{"role": "user", "content": {}}], "invalid_request", "messages[0].content"),
        ([ASSISTANT | {"refusal": 5}], "invalid_request", "messages[0].refusal"),
        ([ASSISTANT | {"reasoning_content": []}], "invalid_request", "messages[0].reasoning_content"),
        ([ASSISTANT | {"function_call": "f"}], "invalid_request", "messages[0].function_call"),
        ([ASSISTANT | {"function_call": {}}], "invalid_request", "messages[0].function_call.name"),
        ([ASSISTANT | {"tool_calls": [{"type": "odd"}]}], "invalid_request", "messages[0].tool_calls[0]"),
        ([ASSISTANT | {"tool_calls": "x"}], "invalid_request", "messages[0].tool_calls"),
        ([ASSISTANT | {"tool_calls": ["x"]}], "invalid_request", "messages[0].tool_calls"),
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
        ({"type": "video_url", "video_url": None}, "invalid_request", ".video_url"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "invalid_request", ".input_audio"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "ogg"}}, "invalid_request", ".input_audio"),
        ({"type": "input_audio", "input_audio": "AAAA"}, "invalid_request", ".input_audio"),
        ({"type": "input_image", "file_id": "x"}, "unsupported_parameter", ".file_id"),
        ({"type": "input_image"}, "invalid_request", ".image_url"),
        ({"type": "image"}, "invalid_request", ".image_url"),
        ({"type": "image", "source": {"type": "url"}}, "invalid_request", ".source"),
        ({"type": "file", "file": {"file_id": "x"}}, "unsupported_parameter", ""),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}}, "unsupported_parameter", ""),
        ({"type": "file", "file": {"file_data": "data:text/plain;base64,A"}}, "invalid_request", ""),
        ({"type": "file", "file": {"file_data": "AAAA"}}, "unsupported_parameter", ""),
    ],
)
def test_incomplete_media(http, service, part, code, param):
    response = post(http, [USER, {"role": "user", "content": [TEXT_PART, part]}])
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code)
    assert error["param"] == "messages[1].content[1]" + param
    assert service.requests == []


@pytest.mark.parametrize(
    "part, source",
    [
        ({"type": "input_image", "image_url": "https://host/a.png", "detail": "auto"}, "https://host/a.png"),
        ({"type": "input_image", "image_url": {"url": "https://host/a.png"}}, "https://host/a.png"),
        ({"type": "image", "image": "https://host/a.png"}, "https://host/a.png"),
        ({"type": "image", "image": "AAAA"}, "data:image/png;base64,AAAA"),
        ({"type": "image", "url": "https://host/a.png"}, "https://host/a.png"),
        ({"type": "image", "image_url": {"url": "https://host/a.png"}}, "https://host/a.png"),
        ({"type": "image", "source": {"type": "url", "url": "https://host/a.png"}}, "https://host/a.png"),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "AAAA"}},
            "data:image/jpeg;base64,AAAA",
        ),
        (
            {"type": "image", "source_type": "base64", "mime_type": "image/webp", "data": "AA"},
            "data:image/webp;base64,AA",
        ),
        ({"type": "image", "base64": "AAAA", "mime_type": "image/png"}, "data:image/png;base64,AAAA"),
        ({"type": "image", "data": "AAAA", "mimeType": "image/png"}, "data:image/png;base64,AAAA"),
    ],
)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_images_in_the_forms_of_other_apis(http, service, part, source, role):
    response = post(http, [{"role": role, "content": [TEXT_PART, part]}])
    assert response.status_code == 200, response.text
    (media,) = service.requests[0].prompts[0].media
    assert media == MediaPart("image", source, "messages[0].content[1]")


@pytest.mark.parametrize(
    "data",
    ["data:text/plain;base64,aMOp", "data:text/markdown;charset=utf-8;base64,aMOp", "data:application/json,h%C3%A9"],
)
def test_text_files_are_text(http, service, data):
    content = [{"type": "file", "file": {"filename": "a.txt", "file_data": data}}]
    assert post(http, [{"role": "user", "content": content}]).status_code == 200
    assert service.requests[0].prompts[0].messages[0]["content"] == "hé"
