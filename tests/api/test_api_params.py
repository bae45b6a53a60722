"""Ranges, types and neutral values of all parameters, and unsupported or unknown names."""

from __future__ import annotations

import pytest

from millstream.api.openai.params import UNSUPPORTED

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


def post(http, route, body):
    return http.post(f"/v1/{route}", json=body)


def refused(http, route, body, *, code, param):
    response = post(http, route, body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)
    return error["message"]


BAD = [
    ("temperature", -0.1, "at least 0"),
    ("temperature", 2.01, "at most 2"),
    ("temperature", "0.5", "must be a number"),
    ("temperature", True, "must be a number"),
    ("top_p", 0, "greater than 0"),
    ("top_p", 1.5, "at most 1"),
    ("min_p", -1, "at least 0"),
    ("min_p", 1.1, "at most 1"),
    ("top_k", -2, "at least -1"),
    ("top_k", 1.5, "must be an integer"),
    ("top_k", True, "must be an integer"),
    ("seed", 2**63, "less than"),
    ("seed", "1", "must be an integer"),
    ("seed", 1.5, "must be an integer"),
    ("repetition_penalty", 0, "greater than 0"),
    ("repetition_penalty", 10.5, "at most 10"),
    ("presence_penalty", 2.5, "at most 2"),
    ("frequency_penalty", -2.5, "at least -2"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", 1.0, "must be an integer"),
    ("max_completion_tokens", -1, "at least 1"),
    ("n", 0, "at least 1"),
    ("n", 129, "at most 128"),
    ("stream", 1, "true or false"),
    ("stream", "true", "true or false"),
    ("ignore_eos", "no", "true or false"),
    ("model", 5, "must be a string"),
    ("user", 5, "must be a string"),
    ("metadata", [], "must be an object"),
    ("stream_options", 3, "must be an object"),
    ("stop", 5, "string or a list"),
    ("stop", ["x"] * 17, "at most 16"),
    ("stop", "", "non-empty"),
    ("logit_bias", [], "object"),
    ("logit_bias", {"x": 1}, "not a token id"),
    ("logit_bias", {"-1": 1}, "not a token id"),
    ("logit_bias", {"²": 1}, "not a token id"),
]


@pytest.mark.parametrize("route, base", [("chat/completions", CHAT), ("completions", TEXT)])
@pytest.mark.parametrize("name, value, words", BAD)
def test_bad_values(http, service, route, base, name, value, words):
    message = refused(http, route, base | {name: value}, code="invalid_request", param=name)
    assert words in message and message.startswith(name)
    assert service.requests == []


@pytest.mark.parametrize(
    "route, body, param",
    [
        ("chat/completions", CHAT | {"stop": ["a", ""]}, "stop[1]"),
        ("chat/completions", CHAT | {"logit_bias": {"5": 101}}, "logit_bias.5"),
        ("chat/completions", CHAT | {"logit_bias": {"5": True}}, "logit_bias.5"),
        ("chat/completions", CHAT | {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ("chat/completions", CHAT | {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ("chat/completions", CHAT | {"logprobs": 1}, "logprobs"),
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", CHAT | {"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ("chat/completions", {}, "messages"),
        ("completions", TEXT | {"logprobs": True}, "logprobs"),
        ("completions", TEXT | {"logprobs": 21}, "logprobs"),
        ("completions", {}, "prompt"),
        ("completions", {"prompt": None}, "prompt"),
        ("completions", {"prompt": 5}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [1, -2]}, "prompt"),
        ("completions", {"prompt": [1, True]}, "prompt[0]"),
        ("completions", {"prompt": ["a", 2]}, "prompt[1]"),
        ("completions", {"prompt": [[1], []]}, "prompt[1]"),
        ("completions", {"prompt": [[1], [1.5]]}, "prompt[1]"),
        ("completions", {"prompt": ["a"] * 2049}, "prompt"),
    ],
)
def test_bad_values_with_a_path(http, route, body, param):
    refused(http, route, body, code="invalid_request", param=param)


GOOD = [
    {"temperature": 0},
    {"temperature": 2},
    {"top_p": 1e-9},
    {"top_k": -1},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"stop": []},
    {"stop": ["x"] * 16},
    {"max_tokens": 4, "max_completion_tokens": 4},
    {"stream_options": {"include_usage": None, "include_obfuscation": False}},
    {"n": 2, "best_of": 2},
    {"best_of": 1},
    {"user": "u", "prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "flex", "metadata": {"a": 1}},
    dict.fromkeys(["temperature", "top_p", "seed", "stop", "n", "stream", "max_tokens", "logit_bias", "model", "user"]),
]


@pytest.mark.parametrize("route, base", [("chat/completions", CHAT), ("completions", TEXT)])
@pytest.mark.parametrize("more", GOOD, ids=lambda more: ",".join(more))
def test_good_values(http, service, route, base, more):
    response = post(http, route, base | more)
    assert response.status_code == 200, response.text
    sampling = service.requests[0].sampling
    assert sampling.top_k == 0
    assert service.requests[0].seeded is (more.get("seed") is not None)


def test_no_model_means_the_services_default(http, service):
    assert post(http, "chat/completions", CHAT).json()["model"] == "org/tiny"
    assert service.requests[0].model == ""


NOT_NEUTRAL = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "functions": [{"name": "f"}],
    "tool_choice": "required",
    "function_call": {"name": "f"},
    "parallel_tool_calls": True,
    "response_format": {"type": "json_object"},
    "reasoning_effort": "low",
    "modalities": ["text", "audio"],
    "store": True,
    "echo": True,
    "best_of": 3,
    "suffix": "end",
    "min_tokens": False,
    "add_generation_prompt": 1,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_parameters_are_refused(http, service, name):
    value = NOT_NEUTRAL.get(name, {"some": "thing"})
    message = refused(http, "chat/completions", CHAT | {name: value}, code="unsupported_parameter", param=name)
    assert name in message and service.requests == []


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_neutral_values_of_unsupported_parameters_are_accepted(http, name):
    for value in (None, *UNSUPPORTED[name]):
        response = post(http, "completions", TEXT | {name: value})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "route, body, param, hint",
    [
        ("chat/completions", CHAT | {"temprature": 1}, "temprature", "temperature"),
        ("chat/completions", CHAT | {"max_token": None}, "max_token", "max_tokens"),
        ("chat/completions", CHAT | {"prompt": "x"}, "prompt", ""),
        ("completions", TEXT | {"messages": []}, "messages", ""),
        ("completions", TEXT | {"wholly_else": 1}, "wholly_else", ""),
        (
            "completions",
            TEXT | {"stream_options": {"include_use": True}},
            "stream_options.include_use",
            "stream_options.include_usage",
        ),
    ],
)
def test_unknown_names(http, route, body, param, hint):
    message = refused(http, route, body, code="unknown_parameter", param=param)
    assert f"Did you mean {hint}?" in message if hint else "Did you mean" not in message


def test_unsupported_stream_option(http):
    body = CHAT | {"stream_options": {"continuous_usage_stats": True}}
    refused(http, "chat/completions", body, code="unsupported_parameter", param="stream_options.continuous_usage_stats")


def test_a_long_value_is_shortened_in_the_message(http):
    message = refused(
        http, "chat/completions", CHAT | {"temperature": "x" * 5000}, code="invalid_request", param="temperature"
    )
    assert len(message) < 150
