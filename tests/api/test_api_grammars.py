"""Structured output, under every parameter name that clients use."""

from __future__ import annotations

import json

import pytest

from millstream.api.openai.grammars import StructuredRequest
from millstream.errors import BadRequest
from millstream.types import Grammar

CHAT = ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TEXT = ("completions", {"prompt": "hi"})
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
ANY = Grammar("json_schema", '{"type":"object"}')
OURS = Grammar("json_schema", AS_TEXT)


def named(**fields):
    return {"type": "json_schema", "json_schema": {"name": "n", **fields}}


ACCEPTED = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, OURS),
    ({"response_format": named(schema=SCHEMA)}, OURS),
    ({"response_format": named(schema=SCHEMA, strict=True, description="d")}, OURS),
    ({"response_format": named(schema=SCHEMA, strict=False)}, OURS),
    ({"response_format": named()}, ANY),
    ({"guided_json": SCHEMA}, OURS),
    ({"guided_json": AS_TEXT}, OURS),
    ({"json_schema": SCHEMA}, OURS),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["yes", 'n"o', "é"]}, Grammar("lark", 'start: CHOICE\nCHOICE: "yes" | "n\\"o" | "\\u00e9"')),
    ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
    ({"grammar": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
    ({"grammar": ""}, None),
    ({"structured_outputs": {"json": SCHEMA}}, OURS),
    ({"structured_outputs": {"json_object": True, "regex": None}}, ANY),
    ({"structured_outputs": {"json_object": False}}, None),
    (
        {"structured_outputs": {"choice": ["a"], "disable_fallback": False}},
        Grammar("lark", 'start: CHOICE\nCHOICE: "a"'),
    ),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, Grammar("regex", "a")),
]


@pytest.mark.parametrize("route, base", [CHAT, TEXT])
@pytest.mark.parametrize("fields, grammar", ACCEPTED)
def test_accepted(http, service, route, base, fields, grammar):
    response = http.post(f"/v1/{route}", json=base | fields)
    assert response.status_code == 200, response.text
    assert service.requests[0].grammar == grammar


REFUSED = [
    ({"response_format": "json"}, "response_format", "must be an object"),
    ({"response_format": {"type": "xml"}}, "response_format", '"json_schema"'),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "with a schema"),
    ({"response_format": named(schema=[])}, "response_format.json_schema.schema", "an object"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": 5}, "guided_json", "an object"),
    ({"guided_regex": 5}, "guided_regex", "non-empty string"),
    ({"guided_choice": []}, "guided_choice", "list of 1 to"),
    ({"guided_choice": ["a", 5]}, "guided_choice", "non-empty strings"),
    ({"guided_grammar": ["x"]}, "guided_grammar", "non-empty string"),
    ({"structured_outputs": []}, "structured_outputs", "must be an object"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or false"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex", "cannot be combined"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "cannot be combined"),
]


@pytest.mark.parametrize("route, base", [CHAT, TEXT])
@pytest.mark.parametrize("fields, param, words", REFUSED)
def test_refused(http, service, route, base, fields, param, words):
    response = http.post(f"/v1/{route}", json=base | fields)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["code"], error["param"]) == ("invalid_request", param)
    assert words in error["message"]
    assert service.requests == []


def test_unsupported_structured_outputs(http):
    body = CHAT[1] | {"structured_outputs": {"structural_tag": "x"}}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "structured_outputs.structural_tag")


def nested(depth):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def wide(count):
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}}


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"guided_regex": "a" * 262_145}, "262145 bytes; at most 262144"),
        ({"guided_regex": "é" * 131_073}, "262146 bytes; at most 262144"),
        ({"guided_choice": [f"c{number}" for number in range(10_001)]}, "list of 1 to 10000"),
        ({"guided_json": nested(300)}, "levels of nesting; at most 100"),
        ({"guided_json": json.dumps(nested(300))}, "nested deeper than 200 levels"),
        ({"guided_json": wide(10_000)}, "10000 properties in one object; at most 1000"),
        ({"guided_json": wide(1_001)}, "1001 properties in one object; at most 1000"),
        ({"guided_json": {"enum": list(range(30_000))}}, "values; at most 30000"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "characters; at most 262144"),
    ],
    ids=["regex", "utf-8", "choices", "deep", "deep text", "wider", "wide", "enum", "long"],
)
def test_grammars_have_limits(fields, words):
    with pytest.raises(BadRequest) as refused:
        StructuredRequest.model_validate(fields)
    assert refused.value.param == next(iter(fields))
    assert words in refused.value.message
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": nested(49)},
        {"guided_json": wide(1_000)},
        {"guided_json": {"enum": [f"value {number}" for number in range(10_000)]}},
        {"guided_choice": [f"choice {number}" for number in range(10_000)]},
    ],
)
def test_large_grammars_are_accepted(fields):
    assert StructuredRequest.model_validate(fields).output_grammar() is not None


ECHO_AND_BEST_OF = [
    ({"echo": True}, {"echo": True}),
    ({"echo": True, "max_tokens": 0}, {"echo": True, "max_tokens": 0}),
    ({"prompt_logprobs": 3, "max_tokens": 0}, {"prompt_logprobs": 3, "max_tokens": 0}),
    ({"prompt_logprobs": 0}, {"prompt_logprobs": 0, "max_tokens": None}),
    ({"best_of": 4, "n": 2}, {"best_of": 4, "n": 2}),
    ({"best_of": 2, "n": 2, "stream": True}, {"best_of": None, "n": 2}),
    ({"echo": False, "best_of": 1, "stream": True}, {"echo": False, "best_of": None}),
]


@pytest.mark.parametrize("fields, expected", ECHO_AND_BEST_OF)
def test_echo_prompt_logprobs_and_best_of(http, service, fields, expected):
    response = http.post("/v1/completions", json={"prompt": "hi"} | fields)
    assert response.status_code == 200, response.text
    request = service.requests[0]
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(
    "route, base, fields, param",
    [
        (*TEXT, {"best_of": 2, "n": 3}, "best_of"),
        (*TEXT, {"best_of": True}, "best_of"),
        (*TEXT, {"best_of": 2, "stream": True}, "best_of"),
        (*TEXT, {"max_tokens": 0}, "max_tokens"),
        (*TEXT, {"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        (*TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (*CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (*CHAT, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (*TEXT, {"prompt_logprobs": True}, "prompt_logprobs"),
    ],
)
def test_invalid_echo_and_best_of(http, route, base, fields, param):
    response = http.post(f"/v1/{route}", json=base | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("fields", [{"best_of": 3}, {"echo": True}])
def test_a_chat_has_neither_echo_nor_best_of(http, fields):
    error = http.post("/v1/chat/completions", json=CHAT[1] | fields).json()["error"]
    assert error["code"] == "unsupported_parameter"
