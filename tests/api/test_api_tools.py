"""Tools in all their forms: what the service gets, and how calls come back."""

from __future__ import annotations

import json

import pytest

from millstream.api.openai.custom_tools import InputDecoder
from millstream.types import CallDelta, Delta, FinishReason, Grammar

ASK = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
CODE = {"type": "custom", "custom": {"name": "code", "description": "Runs code."}}
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"+'}}
REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def post(http, **more):
    return http.post("/v1/chat/completions", json=ASK | more)


def asked(http, service, **more):
    """The tools that the service gets."""
    response = post(http, **more)
    assert response.status_code == 200, response.text
    return service.requests[-1].tools


def custom(form):
    return {"type": "custom", "custom": {"name": "code", "format": form}}


def test_unknown_fields_of_tools_are_ignored(http, service):
    extra = {
        "type": "function",
        "cache_control": {"type": "ephemeral"},
        "function": WEATHER["function"] | {"strict": 1},
    }
    assert asked(http, service, tools=[extra]).tools == (WEATHER,)


def test_the_flat_form_of_the_other_api(http, service):
    assert asked(http, service, tools=[{"type": "function", **WEATHER["function"]}]).tools == (WEATHER,)


def test_long_names(http, service):
    name = "mcp__" + "x" * 123
    assert asked(http, service, tools=[{"type": "function", "function": {"name": name}}]).schemas.keys() == {name}
    assert post(http, tools=[{"type": "function", "function": {"name": name + "x"}}]).status_code == 400


def test_custom_tools_are_functions_of_one_string(http, service):
    use = asked(http, service, tools=[WEATHER, CODE])
    assert use.tools[0] == WEATHER and use.input_grammars == ()
    assert use.tools[1]["function"] == {"name": "code", "description": "Runs code.", "parameters": INPUT}


@pytest.mark.parametrize(
    "form, grammar",
    [
        (None, None),
        ({"type": "text"}, None),
        (LARK, Grammar("lark", 'start: "a"+')),
        (REGEX, Grammar("regex", "a+")),
        ({"type": "grammar", "syntax": "regex", "definition": "a+"}, Grammar("regex", "a+")),
    ],
)
def test_grammars_of_custom_tools(http, service, form, grammar):
    expected = () if grammar is None else (("code", grammar),)
    assert asked(http, service, tools=[custom(form)]).input_grammars == expected


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW, CODE]}}
CHOICES = [
    (None, ("auto", None, None)),
    ("none", ("none", None, None)),
    ("any", ("required", None, None)),
    ({"type": "auto"}, ("auto", None, None)),
    ({"type": "required"}, ("required", None, None)),
    ({"type": "function", "function": {"name": "now"}}, ("required", "now", None)),
    ({"type": "function", "name": "now"}, ("required", "now", None)),
    ({"type": "custom", "custom": {"name": "code"}}, ("required", "code", None)),
    (ALLOWED, ("required", None, {"now", "code"})),
    (
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]},
        ("auto", None, {"now"}),
    ),
]


@pytest.mark.parametrize("choice, expected", CHOICES)
def test_choices(http, service, choice, expected):
    use = asked(http, service, tools=[WEATHER, NOW, CODE], tool_choice=choice)
    assert (use.choice, use.name, use.allowed) == expected
    assert len(use.tools) == 3, "the prompt shows all tools, whichever are allowed"


def test_parallel_tool_calls_without_tools(http, service):
    for value in (True, False):
        assert asked(http, service, parallel_tool_calls=value) is None
        assert asked(http, service, parallel_tool_calls=value, tools=[]) is None


def only(tools, mode="auto"):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    "more, param",
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [custom({"type": "odd"})]}, "tools[0].custom.format"),
        ({"tools": [custom({"type": "grammar"})]}, "tools[0].custom.format.syntax"),
        (
            {"tools": [custom({"type": "grammar", "grammar": {"syntax": "peg", "definition": "a"}})]},
            "tools[0].custom.format.grammar.syntax",
        ),
        (
            {"tools": [custom({"type": "grammar", "grammar": {"syntax": "lark", "definition": " "}})]},
            "tools[0].custom.format.grammar.definition",
        ),
        ({"tools": [CODE, CODE]}, "tools"),
        ({"tools": [NOW], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "custom", "custom": {"name": "code"}}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": only([CODE])}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": only([NOW], "none")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [NOW], "tool_choice": only([])}, "tool_choice.allowed_tools.tools"),
        ({"tools": [NOW], "tool_choice": only(["now"])}, "tool_choice.allowed_tools.tools[0]"),
        ({"tool_choice": "any"}, "tool_choice"),
    ],
)
def test_errors_name_the_field(http, service, more, param):
    response = post(http, **more)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert service.requests == []


TEXT = 'print("é😀")\n'
CALLS = [
    (Delta(0, calls=(CallDelta(0, "c1", "code"),)),),
    *((Delta(0, calls=(CallDelta(0, arguments=piece),)),) for piece in json.dumps({"input": TEXT})),
    (Delta(0, calls=(CallDelta(1, "c2", "now", "{}"),)),),
    (Delta(0, finish_reason=FinishReason.TOOL_CALLS),),
]


def test_calls_of_custom_tools(client, service):
    service.steps = CALLS
    message = client.chat.completions.create(model="m", tools=[CODE, NOW], **ASK).choices[0].message
    first, second = message.tool_calls
    assert (first.id, first.type, first.custom.name, first.custom.input) == ("c1", "custom", "code", TEXT)
    assert (second.id, second.type, second.function.name) == ("c2", "function", "now")
    again = [*ASK["messages"], message, {"role": "tool", "tool_call_id": "c1", "content": "é"}]
    client.chat.completions.create(model="m", tools=[CODE, NOW], messages=again)
    sent = service.requests[1].prompts[0].messages[1]["tool_calls"][0]["function"]
    assert sent["name"] == "code" and json.loads(sent["arguments"]) == {"input": TEXT}


def test_streamed_calls_of_custom_tools(http, service):
    service.steps = CALLS
    lines = post(http, tools=[CODE, NOW], stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    pieces = [piece for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces[0] == {"index": 0, "id": "c1", "type": "custom", "custom": {"name": "code", "input": ""}}
    assert pieces[-1]["function"] == {"name": "now", "arguments": "{}"}
    middle = pieces[1:-1]
    assert all(piece.keys() == {"index", "custom"} and piece["custom"]["input"] for piece in middle)
    assert "".join(piece["custom"]["input"] for piece in middle) == TEXT
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("form", ['{"text": "ls"}', '{"input": ["ls"]}', '{"inp', '"ls"'])
def test_a_custom_call_of_another_form_is_streamed_as_it_is_sent_whole(http, service, form):
    pieces = [(Delta(0, calls=(CallDelta(0, arguments=char),)),) for char in form]
    service.steps = [
        (Delta(0, calls=(CallDelta(0, "c1", "code"),)),),
        *pieces,
        (Delta(0, calls=(CallDelta(1, "c2", "now", "{}"),)),),
        (Delta(0, finish_reason=FinishReason.TOOL_CALLS),),
    ]
    whole = post(http, tools=[CODE, NOW]).json()["choices"][0]["message"]["tool_calls"]
    lines = post(http, tools=[CODE, NOW], stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    pieces = [piece for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(piece["custom"]["input"] for piece in pieces if "custom" in piece) == form
    assert whole[0]["custom"]["input"] == form
    assert [piece["index"] for piece in pieces] == sorted(piece["index"] for piece in pieces)


@pytest.mark.parametrize("text", ["", "plain", 'a "b" \\ \n', "😀😀", "\\ud83d", "a\\\\😀", "\ud83d"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_input_is_decoded_whatever_the_pieces(text, size, ascii_only):
    source = json.dumps({"input": text}, ensure_ascii=ascii_only)
    decoder = InputDecoder()
    pieces = [decoder.push(source[start : start + size]) for start in range(0, len(source), size)]
    assert "".join(pieces) == text.replace("\ud83d", "\ufffd")


LEGACY = {"functions": [WEATHER["function"]]}


def test_functions_in_the_older_form(client, service):
    service.steps = [
        (Delta(0, calls=(CallDelta(0, "c1", "weather", '{"city": '),)),),
        (Delta(0, calls=(CallDelta(0, arguments='"Bern"}'),), finish_reason=FinishReason.TOOL_CALLS),),
    ]
    choice = client.chat.completions.create(model="m", function_call="auto", **LEGACY, **ASK).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("function_call", None)
    called = choice.message.function_call
    assert (called.name, json.loads(called.arguments)) == ("weather", {"city": "Bern"})
    use = service.requests[0].tools
    assert (use.tools, use.choice, use.parallel) == ((WEATHER,), "auto", False)
    name, arguments = "", ""
    for chunk in client.chat.completions.create(
        model="m", function_call={"name": "weather"}, stream=True, **LEGACY, **ASK
    ):
        delta = chunk.choices[0].delta.function_call
        name += (delta and delta.name) or ""
        arguments += (delta and delta.arguments) or ""
    assert (name, json.loads(arguments)) == ("weather", {"city": "Bern"})
    assert (service.requests[1].tools.choice, service.requests[1].tools.name) == ("required", "weather")


def test_the_older_fields_may_be_empty(http, service):
    use = asked(http, service, tools=[NOW], functions=[], function_call="auto")
    assert use.schemas.keys() == {"now"} and use.parallel
    assert asked(http, service, functions=[], function_call="none") is None
