"""Ranges, types and neutral values of all parameters, and unsupported or unknown names."""

from __future__ import annotations

import logging

import pytest

from millstream.api.openai.params import IGNORED, UNSUPPORTED
from millstream.api.openai.schema import ChatRequest, CompletionRequest
from millstream.api.openai.thinking import ThinkingRequest
from millstream.parameters import NO_LIMIT
from millstream.types import Delta, FinishReason, Grammar, TextPrompt, Thinking

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


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
    ("top_p", 1.5, "at most 1"),
    ("min_p", -1, "at least 0"),
    ("min_p", 1.1, "at most 1"),
    ("top_k", -2, "at least -1"),
    ("top_k", 1.5, "must be an integer"),
    ("top_k", True, "must be an integer"),
    ("seed", 2**63, "at most"),
    ("seed", "1", "must be an integer"),
    ("seed", 1.5, "must be an integer"),
    ("repetition_penalty", 1e-39, "at least 0.01"),
    ("repetition_penalty", 10.5, "at most 10"),
    ("presence_penalty", 2.5, "at most 2"),
    ("frequency_penalty", -2.5, "at least -2"),
    ("top_p", -0.1, "at least 0"),
    ("repeat_penalty", 0, "at least 0.01"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", 1.5, "must be an integer"),
    ("max_tokens", -2, "at least -1"),
    ("max_completion_tokens", 0, "at least 1"),
    ("n_predict", -2, "at least -1"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", True, "must be an integer"),
    ("stop_token_ids", 5, "list of"),
    ("stop_token_ids", [-1], "list of"),
    ("stop_token_ids", [True], "list of"),
    ("stop_token_ids", [1] * 257, "at most 256"),
    ("regex", 5, "non-empty string"),
    ("n", 0, "at least 1"),
    ("n", 129, "at most 128"),
    ("stream", 1, "true or false"),
    ("stream", "true", "true or false"),
    ("ignore_eos", "no", "true or false"),
    ("model", 5, "must be a string"),
    ("stream_options", 3, "must be an object"),
    ("stop", 5, "string or a list"),
    ("stop", ["x"] * 65, "at most 64"),
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
        ("chat/completions", CHAT | {"stop": ["a", 5]}, "stop[1]"),
        ("chat/completions", CHAT | {"max_tokens": 3, "n_predict": 4}, "n_predict"),
        ("chat/completions", CHAT | {"regex": "a+", "guided_regex": "b+"}, "regex"),
        ("chat/completions", CHAT | {"reasoning_effort": "enormous"}, "reasoning_effort"),
        ("chat/completions", CHAT | {"reasoning_effort": 5}, "reasoning_effort"),
        ("chat/completions", CHAT | {"thinking": {"type": "maybe"}}, "thinking"),
        ("chat/completions", CHAT | {"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ("chat/completions", CHAT | {"reasoning": "low"}, "reasoning"),
        ("chat/completions", CHAT | {"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ("chat/completions", CHAT | {"reasoning": {"exclude": 1}}, "reasoning.exclude"),
        ("chat/completions", CHAT | {"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ("chat/completions", CHAT | {"enable_thinking": "no"}, "enable_thinking"),
        ("chat/completions", CHAT | {"include_reasoning": 1}, "include_reasoning"),
        ("chat/completions", CHAT | {"functions": [{"name": "f"}], "tools": TOOLS}, "functions"),
        ("chat/completions", CHAT | {"functions": ["f"]}, "functions"),
        ("chat/completions", CHAT | {"functions": [{"name": "no good"}]}, "functions[0].name"),
        ("chat/completions", CHAT | {"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ("chat/completions", CHAT | {"function_call": {"name": "g"}}, "function_call"),
        ("completions", TEXT | {"suffix": 5}, "suffix"),
        ("completions", TEXT | {"suffix": "x", "echo": True}, "suffix"),
        ("completions", {"prompt": [1, 2], "suffix": "x"}, "suffix"),
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
    {"top_k": 0.0},
    {"top_p": 0},
    {"stop": ""},
    {"stop": ["", "a"]},
    {"max_tokens": -1},
    {"max_tokens": 4.0, "n": 1.0, "min_tokens": 2.0, "n_predict": 4},
    {"logprobs": False},
    {"logprobs": 0},
    {"wholly_else": 1},
    {"stream_options": {"continuous_usage_stats": True, "wholly_else": 1}},
    {"seed": -1},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"stop": []},
    {"stop": ["x"] * 16},
    {"max_tokens": 4, "max_completion_tokens": 4},
    {"stream_options": {"include_usage": None, "include_obfuscation": False}},
    {"n": 2, "best_of": 2},
    {"best_of": 1},
    {"user": "u", "prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "flex", "metadata": {"a": 1}},
    {"user": 5, "metadata": []},
    dict.fromkeys(["temperature", "top_p", "seed", "stop", "n", "stream", "max_tokens", "logit_bias", "model", "user"]),
]


@pytest.mark.parametrize("route, base", [("chat/completions", CHAT), ("completions", TEXT)])
@pytest.mark.parametrize("more", GOOD, ids=lambda more: ",".join(more))
def test_good_values(http, service, route, base, more):
    response = post(http, route, base | more)
    assert response.status_code == 200, response.text
    sampling = service.requests[0].sampling
    assert sampling.top_k <= 0
    assert service.requests[0].seeded is (more.get("seed", -1) not in (None, -1))


def test_no_model_means_the_services_default(http, service):
    assert post(http, "chat/completions", CHAT).json()["model"] == "org/tiny"
    assert service.requests[0].model == ""


NOT_NEUTRAL = {"prompt": ["a"]}
ENDPOINTS = [
    ("chat/completions", CHAT, ChatRequest.model_fields),
    ("completions", TEXT, CompletionRequest.model_fields),
]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_parameters_are_refused(http, service, name):
    value = NOT_NEUTRAL.get(name, {"some": "thing"})
    for route, base, served in ENDPOINTS:
        if name not in served:
            message = refused(http, route, base | {name: value}, code="unsupported_parameter", param=name)
            assert name in message and service.requests == []


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_neutral_values_of_unsupported_parameters_are_accepted(http, name):
    for route, base, served in ENDPOINTS:
        for value in (None, *(() if name in served else UNSUPPORTED[name])):
            response = post(http, route, {name: value} | base)
            assert response.status_code == 200, response.text


@pytest.mark.parametrize("value", ["something", 5, True, {"some": "thing"}])
def test_ignored_parameters_take_any_value(http, service, value):
    names = IGNORED - ThinkingRequest.model_fields.keys() - {"parallel_tool_calls", "chat_template_kwargs"}
    assert post(http, "chat/completions", CHAT | dict.fromkeys(names, value)).status_code == 200
    assert post(http, "completions", TEXT | dict.fromkeys(IGNORED, value)).status_code == 200
    with_none = (post(http, "chat/completions", CHAT), post(http, "completions", TEXT))
    assert all(response.status_code == 200 for response in with_none)
    assert service.requests[:2] == service.requests[2:], "they change nothing"


def test_one_debug_line_names_what_is_ignored(http, caplog):
    with caplog.at_level(logging.DEBUG, "millstream.api.params"):
        body = CHAT | {
            "store": True,
            "user": None,
            "wholly_else": 1,
            "stream_options": {"continuous_usage_stats": True},
        }
        assert post(http, "chat/completions", body).status_code == 200
        assert post(http, "chat/completions", CHAT | {"temperature": 1, "seed": None}).status_code == 200
    (line,) = [record.getMessage() for record in caplog.records if record.name == "millstream.api.params"]
    assert line.endswith(": store, wholly_else, stream_options.continuous_usage_stats")


def test_names_in_the_log_are_bounded_and_plain(http, caplog):
    with caplog.at_level(logging.DEBUG, "millstream.api.params"):
        names = {"new\nline": 1, "x" * 5000: 1, **{f"{number} of many": 1 for number in range(100)}}
        assert post(http, "chat/completions", CHAT | names).status_code == 200
    (line,) = [record.getMessage() for record in caplog.records if record.name == "millstream.api.params"]
    assert "\n" not in line and len(line) < 1000 and "and 70 more" in line


@pytest.mark.parametrize(
    "route, body, param, hint",
    [
        ("chat/completions", CHAT | {"temprature": 1}, "temprature", "temperature"),
        ("chat/completions", CHAT | {"max_token": None}, "max_token", "max_tokens"),
        ("chat/completions", CHAT | {"max_new_token": 5}, "max_new_token", "max_new_tokens"),
        ("completions", TEXT | {"streaming": True}, "streaming", "stream"),
        (
            "completions",
            TEXT | {"stream_options": {"include_use": True}},
            "stream_options.include_use",
            "stream_options.include_usage",
        ),
    ],
)
def test_names_that_look_like_typos(http, route, body, param, hint):
    message = refused(http, route, body, code="unknown_parameter", param=param)
    assert f"Did you mean {hint}?" in message


SERVED = [
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"stop_token_ids": [5, 7.0]}, {"stop_token_ids": (5, 7)}),
    ({"regex": "a+"}, {"grammar": Grammar("regex", "a+")}),
    ({"stop": ["", "a", ""]}, {"stop": ("a",)}),
    ({"max_tokens": -1}, {"max_tokens": NO_LIMIT}),
    ({"max_completion_tokens": -1.0}, {"max_tokens": NO_LIMIT}),
    ({"num_predict": 8, "max_output_tokens": 8}, {"max_tokens": 8}),
    ({"stop_sequences": ["a"]}, {"stop": ("a",)}),
    ({"n_predict": 8}, {"max_tokens": 8}),
]
SAMPLED = [({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}), ({"top_p": 0}, {"top_p": 0})]


@pytest.mark.parametrize("route, base", [("chat/completions", CHAT), ("completions", TEXT)])
@pytest.mark.parametrize("more, expected", SERVED + SAMPLED)
def test_parameters_of_other_servers_are_served(http, service, route, base, more, expected):
    assert post(http, route, base | more).status_code == 200
    (request,) = service.requests
    subject = request.sampling if (more, expected) in SAMPLED else request
    assert {name: getattr(subject, name) for name in expected} == expected
    assert not request.unset & expected.keys(), "a default of the model must not replace it"


ON = {"enable_thinking": True, "thinking": True}
THINKING = [
    ({"reasoning_effort": "max"}, Thinking("max"), {}),
    ({"reasoning_effort": "x-high"}, Thinking("xhigh"), {}),
    ({"reasoning_effort": "default"}, Thinking(), {}),
    ({"enable_thinking": False}, Thinking("none"), {}),
    ({"enable_thinking": True}, Thinking(), ON),
    ({"enable_thinking": True, "reasoning_effort": "low"}, Thinking("low"), {}),
    ({"enable_thinking": True, "chat_template_kwargs": {"thinking": 3}}, Thinking(), ON | {"thinking": 3}),
    ({"thinking": {"type": "enabled", "budget_tokens": 500}}, Thinking(budget=500), ON),
    ({"thinking": {"type": "adaptive"}}, Thinking(), {}),
    ({"thinking": {"type": "disabled"}}, Thinking("none"), {}),
    ({"thinking": False}, Thinking("none"), {}),
    ({"reasoning": {"effort": "high", "summary": "auto"}}, Thinking("high"), {}),
    ({"reasoning": {"max_tokens": 100.0}}, Thinking(budget=100), {}),
    ({"reasoning": {"enabled": False}}, Thinking("none"), {}),
    ({"reasoning": {}, "reasoning_effort": None}, Thinking(), {}),
]


@pytest.mark.parametrize("more, thinking, kwargs", THINKING)
def test_reasoning_under_every_name(http, service, more, thinking, kwargs):
    response = post(http, "chat/completions", CHAT | more)
    assert response.status_code == 200, response.text
    (request,) = service.requests
    assert (request.thinking, request.prompts[0].template_kwargs) == (thinking, kwargs)


@pytest.mark.parametrize("more", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_is_left_out(http, service, more, stream):
    service.steps = [(Delta(0, reasoning="hidden"),), (Delta(0, "shown", finish_reason=FinishReason.STOP),)]
    body = CHAT | {"stream": stream}
    response = post(http, "chat/completions", body | more)
    assert "hidden" not in response.text and "shown" in response.text
    assert "hidden" in post(http, "chat/completions", body | {"include_reasoning": True}).text


def test_suffix_is_passed_on(http, service):
    assert post(http, "completions", {"prompt": ["a", "b"], "suffix": "end"}).status_code == 200
    assert post(http, "completions", {"prompt": "a", "suffix": ""}).status_code == 200
    assert service.requests[0].prompts == (TextPrompt("a", "end"), TextPrompt("b", "end"))
    assert service.requests[1].prompts == (TextPrompt("a"),)


def test_completions_are_short_unless_asked(http, service):
    for more in ({}, {"max_tokens": -1}, {"max_tokens": 40}):
        assert post(http, "completions", TEXT | more).status_code == 200
    assert [request.max_tokens for request in service.requests] == [None, NO_LIMIT, 40]
    assert {request.default_max_tokens for request in service.requests} == {16}


def test_a_long_value_is_shortened_in_the_message(http):
    message = refused(
        http, "chat/completions", CHAT | {"temperature": "x" * 5000}, code="invalid_request", param="temperature"
    )
    assert len(message) < 150
