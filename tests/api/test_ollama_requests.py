"""POST /api/chat and /api/generate: what the service is asked, and what is refused."""

from __future__ import annotations

import logging

import ollama
import pytest

from millstream import errors
from millstream.types import ChatPrompt, Grammar, MediaPart, Sampling, TextPrompt, Thinking
from support.ollama import CHAT, PROMPT, WEATHER, asked, refusal

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAAB"


def test_defaults_are_left_to_the_model(http, service):
    request = asked(http, service, "/api/chat", CHAT)
    assert request.sampling == Sampling(temperature=1.0) and not request.seeded
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"} <= request.unset
    assert (request.max_tokens, request.stop, request.grammar, request.tools) == (None, (), None, None)
    assert request.thinking == Thinking() and request.logprobs is None


def test_options(http, service):
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40.0,
        "min_p": 0.1,
        "seed": 42,
        "num_predict": 128,
        "stop": ["END", ""],
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "num_ctx": 8192,
        "num_gpu": 1,
        "mirostat": 0,
        "tfs_z": 1.0,
        "typical_p": 1,
        "something_new": [1],
        "num_thread": None,
    }
    request = asked(http, service, "/api/chat", CHAT | {"options": options})
    assert request.sampling == Sampling(0.5, 0.9, 40, 0.1, 42, 1.1, 0.2, 0.3)
    assert request.unset == {"logit_bias"} and request.seeded
    assert (request.max_tokens, request.stop) == (128, ("END",))


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"num_predict": -1}, {"max_tokens": 2**31 - 1}),
        ({"num_predict": -2}, {"max_tokens": 2**31 - 1}),
        ({"num_predict": None}, {"max_tokens": None}),
        ({"seed": -1}, {"seeded": False}),
        ({"seed": 0}, {"seeded": True}),
        ({"top_p": 0}, {"sampling": Sampling(temperature=1.0, top_p=0)}),
        ({"top_k": -1}, {"sampling": Sampling(temperature=1.0, top_k=-1)}),
        ({"repeat_last_n": 0, "repeat_penalty": 1.3}, {"sampling": Sampling(temperature=1.0)}),
        ({"repeat_last_n": 64, "repeat_penalty": 1.3}, {"sampling": Sampling(1.0, repetition_penalty=1.3)}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ""}, {"stop": ()}),
        ({}, {"max_tokens": None}),
    ],
)
def test_options_with_a_meaning_of_their_own(http, service, options, expected):
    request = asked(http, service, "/api/generate", PROMPT | {"options": options})
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(
    "think, thinking, kwargs",
    [
        (None, Thinking(), {}),
        (False, Thinking("none"), {}),
        (True, Thinking(), {"enable_thinking": True, "thinking": True}),
        ("low", Thinking("low"), {}),
        ("high", Thinking("high"), {}),
        ("max", Thinking("max"), {}),
    ],
)
def test_reasoning(http, service, think, thinking, kwargs):
    for path, body in [("/api/chat", CHAT), ("/api/generate", PROMPT)]:
        request = asked(http, service, path, body | {"think": think})
        assert request.thinking == thinking and request.prompts[0].template_kwargs == kwargs


@pytest.mark.parametrize(
    "value, grammar",
    [
        (None, None),
        ("", None),
        ("json", Grammar("json_schema", '{"type":"object"}')),
        ({"type": "integer"}, Grammar("json_schema", '{"type":"integer"}')),
    ],
)
def test_structured_output(http, service, value, grammar):
    assert asked(http, service, "/api/chat", CHAT | {"format": value}).grammar == grammar


def test_a_prompt_is_a_user_message(http, service):
    def prompt(**more):
        return asked(http, service, "/api/generate", PROMPT | more).prompts[0]

    user = {"role": "user", "content": "hi"}
    assert prompt() == ChatPrompt((user,))
    assert prompt(system="Be brief.") == ChatPrompt(({"role": "system", "content": "Be brief."}, user))
    assert prompt(raw=True) == TextPrompt("hi")
    assert prompt(raw=True, template="", context=[1, 2]) == TextPrompt("hi")
    assert prompt(suffix="}") == TextPrompt("hi", "}")
    image = {"type": "image", "media": MediaPart("image", f"data:image/png;base64,{PNG}", "images[0]")}
    text = {"type": "text", "text": "hi"}
    assert prompt(images=[PNG]) == ChatPrompt(({"role": "user", "content": [image, text]},))
    assert prompt(prompt="", images=[PNG]) == ChatPrompt(({"role": "user", "content": [image]},))


def test_what_a_client_gets_can_be_sent_back(http, service):
    """The official client's types lose the ids of calls."""
    call = {"id": "call_x", "function": {"index": 0, "name": "weather", "arguments": {"city": "Zürich"}}}
    answer = ollama.Message(role="assistant", content="", thinking="hm", tool_calls=[call])
    messages = [
        {"role": "user", "content": "Weather?"},
        answer.model_dump(exclude_none=True),
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    request = asked(http, service, "/api/chat", CHAT | {"messages": messages, "tools": [WEATHER]})
    sent = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
    }
    assert request.prompts[0].messages == (
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [sent]},
        {"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": "call00001"},
    )
    assert request.tools.tools[0]["function"]["name"] == "weather"


@pytest.mark.parametrize("ids", [True, False])
def test_results_find_their_calls(http, service, ids):
    calls = [{"function": {"name": name, "arguments": {}}, **({"id": f"id-{name}"} if ids else {})} for name in "aba"]
    results = [
        {"role": "tool", "content": "b", "tool_name": "b", **({"tool_call_id": "id-b"} if ids else {})},
        {"role": "tool", "content": "a", "tool_name": "a"},
        {"role": "tool", "content": "a again"},
        {"role": "tool", "content": "of nothing"},
    ]
    messages = [{"role": "assistant", "tool_calls": calls}, *results]
    found = asked(http, service, "/api/chat", CHAT | {"messages": messages}).prompts[0].messages
    ids_of_calls = [call["id"] for call in found[0]["tool_calls"]]
    first, second, third = ids_of_calls
    assert [message.get("tool_call_id") for message in found[1:]] == [second, first, third, None]
    assert ids_of_calls == (["id-a", "id-b", "id-a"] if ids else ["call00001", "call00002", "call00003"])


@pytest.mark.parametrize(
    "data, kind, uri",
    [
        (PNG, "image", f"data:image/png;base64,{PNG}"),
        ("/9j/4AAQSkZJRgABAQAAAQ", "image", "data:image/jpeg;base64,/9j/4AAQSkZJRgABAQAAAQ"),
        ("UklGRiQAAABXRUJQVlA4", "image", "data:image/webp;base64,UklGRiQAAABXRUJQVlA4"),
        ("UklGRiQAAABXQVZFZm10", "audio", "data:audio/wav;base64,UklGRiQAAABXQVZFZm10"),
        ("data:image/gif;base64,R0lGODlh", "image", "data:image/gif;base64,R0lGODlh"),
    ],
)
def test_images_say_their_type_themselves(http, service, data, kind, uri):
    messages = [{"role": "user", "content": "What?", "images": [data]}]
    (message,) = asked(http, service, "/api/chat", CHAT | {"messages": messages}).prompts[0].messages
    part = MediaPart(kind, uri, "messages[0].images[0]")
    assert message["content"] == [{"type": kind, "media": part}, {"type": "text", "text": "What?"}]


def test_messages_with_empty_and_unknown_fields(http, service):
    messages = [
        {"role": "system", "content": None},
        {"role": "user", "content": "hi", "images": None, "tool_calls": None, "name": "x", "annotations": []},
        {"role": "assistant", "content": "yes", "tool_calls": [], "images": []},
        {"role": "user"},
    ]
    found = asked(http, service, "/api/chat", CHAT | {"messages": messages}).prompts[0].messages
    assert found == (
        {"role": "system", "content": ""},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": ""},
    )


def test_a_begun_answer_is_continued(http, service):
    begun = [*CHAT["messages"], {"role": "assistant", "content": "The answer is ("}]
    assert asked(http, service, "/api/chat", CHAT | {"messages": begun}).prompts[0].continue_final
    assert not asked(http, service, "/api/chat", CHAT).prompts[0].continue_final


def test_fields_without_effect_are_named_in_the_log(http, service, caplog):
    more = {"truncate": True, "shift": False, "context": [1], "dimensions": 3, "options": {"num_ctx": 4096}}
    with caplog.at_level(logging.DEBUG, "millstream.api.params"):
        assert asked(http, service, "/api/chat", CHAT | more | {"tools": [], "format": None}).tools is None
    assert "no effect here: truncate, shift, context, dimensions" in caplog.text
    assert "no effect here: options.num_ctx" in caplog.text


def message(**fields):
    return {"messages": [{"role": "user", "content": "hi"} | fields]}


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": ["hi"]}, "messages[0] must be an object"),
        (message(role="bot"), "messages[0].role must be one of system, user, assistant, tool"),
        (message(content=[{"type": "text", "text": "hi"}]), "messages[0].content must be a string"),
        (message(images="x"), "messages[0].images must be a list"),
        (message(images=[1]), "messages[0].images[0] must be a file in base64"),
        (message(images=["https://example.com/a.png"]), "messages[0].images[0] must be a file in base64, not a path"),
        (message(thinking=1), "messages[0].thinking must be a string"),
        (message(tool_calls={"a": 1}), "messages[0].tool_calls must be a list"),
        (message(tool_calls={}), "messages[0].tool_calls must be a list"),
        (message(tool_calls=[{"name": "f"}]), "messages[0].tool_calls[0] must be an object with a function"),
        (message(tool_calls=[{"function": {}}]), "messages[0].tool_calls[0].function.name is required"),
        (
            message(tool_calls=[{"function": {"name": "f", "arguments": [1]}}]),
            "messages[0].tool_calls[0].function.arguments must be an object",
        ),
        ({"tools": "all"}, "tools must be a list"),
        ({"tools": [{"type": "web"}]}, "tools[0].type is 'web'; only function is supported"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name must be"),
        ({"tools": [WEATHER, WEATHER]}, "two functions named 'weather'"),
        ({"format": "yaml"}, 'format must be "json" or a JSON schema'),
        ({"format": 1}, "format must be"),
        ({"think": "a bit"}, "think must be one of"),
        ({"think": 1}, "think must be true, false or one of"),
        ({"keep_alive": "soon"}, "keep_alive must be a number of seconds or a duration"),
        ({"keep_alive": True}, "keep_alive must be"),
        ({"keep_alive": []}, "keep_alive must be"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"model": 1}, "model must be a string"),
        ({"logprobs": 5}, "logprobs must be true or false"),
        ({"top_logprobs": 21}, "top_logprobs must be at most 20"),
        ({"options": [1]}, "options must be an object"),
        ({"options": {"temperature": "hot"}}, "options.temperature must be a number"),
        ({"options": {"temperature": -1}}, "options.temperature must be at least 0"),
        ({"options": {"top_p": 1.1}}, "options.top_p must be at most 1"),
        ({"options": {"top_k": 1.5}}, "options.top_k must be an integer"),
        ({"options": {"num_predict": True}}, "options.num_predict must be an integer"),
        ({"options": {"num_predict": -3}}, "options.num_predict must be at least -2"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty must be at least 0.01"),
        ({"options": {"stop": [1]}}, "options.stop[0] must be a string"),
        ({"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p is not supported"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z is not supported"),
        ({"options": {"temprature": 1}}, "Did you mean options.temperature?"),
        ({"message": []}, "Did you mean messages?"),
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"temperature": 0.5}, "temperature belongs into options"),
        ({"num_predict": 5}, "num_predict belongs into options"),
        ({"n": 2}, "n is not supported"),
    ],
)
def test_wrong_chats_are_refused_with_the_field_s_name(http, service, wrong, words):
    assert words in refusal(http.post("/api/chat", json=CHAT | wrong), 400)
    assert not service.requests and not service.loads


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"prompt": ["a"]}, "prompt must be a string"),
        ({"raw": True, "system": "Be brief."}, "system cannot be combined with raw"),
        ({"raw": True, "images": [PNG]}, "images cannot be combined with raw"),
        ({"images": [""]}, "images[0] must be a file in base64"),
        ({"suffix": 1}, "suffix must be a string"),
        ({"template": "x"}, "template is not supported"),
    ],
)
def test_wrong_prompts_are_refused_with_the_field_s_name(http, service, wrong, words):
    assert words in refusal(http.post("/api/generate", json=PROMPT | wrong), 400)
    assert not service.requests


def test_a_field_that_the_message_does_not_name_is_put_before_it(http, service):
    service.start_error = errors.BadRequest("it is empty", param="prompt")
    assert refusal(http.post("/api/generate", json=PROMPT), 400) == "prompt: it is empty"


def test_bodies_that_are_no_requests(http):
    assert "not valid JSON" in refusal(http.post("/api/chat", content=b"{"), 400)
    assert "must be a JSON object" in refusal(http.post("/api/generate", content=b"[]"), 400)
    assert "POST" in refusal(http.get("/api/chat"), 405)
    assert "/api/nothing" in refusal(http.get("/api/nothing"), 404)


def test_thousands_of_unknown_fields_take_no_time(http, service):
    assert asked(http, service, "/api/chat", CHAT | {f"temperatur{number}": 1 for number in range(900)})
