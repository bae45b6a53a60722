"""Custom tools: the input is decoded from JSON that arrives in any pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.api.openai.custom_tools import InputDecoder, custom_tool, input_arguments, parse_format
from millstream.errors import BadRequest
from millstream.types import Grammar

TEXTS = ["", "a", 'a "quoted" \\ text', "line\nline\t\r\b\f/", "é🙂\u2028\x00", "\\u0041", "}", '"}']


def decoded(pieces: list[str]) -> str:
    decoder = InputDecoder()
    return "".join(decoder.push(piece) for piece in pieces) + decoder.rest()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("form", ['{{"input": {}}}', ' {{ "input" :{} }} \n'])
def test_every_text_survives_in_single_characters(text, ascii_only, form):
    arguments = form.format(json.dumps(text, ensure_ascii=ascii_only))
    assert decoded(list(arguments)) == decoded([arguments]) == text


@given(st.text(), st.booleans(), st.lists(st.integers(0, 60)))
def test_every_text_survives_in_any_pieces(text, ascii_only, cuts):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    edges = sorted({0, *(cut for cut in cuts if cut < len(arguments)), len(arguments)})
    assert decoded([arguments[a:b] for a, b in itertools.pairwise(edges)]) == text


def test_text_is_told_as_soon_as_it_is_certain():
    decoder = InputDecoder()
    pieces = ['{"inp', 'ut": "ab', "c\\", "n\\ud83d", "\\ude42d", '"}']
    assert [decoder.push(piece) for piece in pieces] == ["", "ab", "c", "\n", "🙂d", ""]


@pytest.mark.parametrize("escaped", ["\\ud83d", "\\ud83dx", "\\ude42", "\\ud83d\\u0041", "\\ud83d\\n"])
def test_half_a_surrogate_pair_can_be_sent(escaped):
    arguments = f'{{"input": "{escaped}"}}'
    decoded(list(arguments)).encode()


def test_arguments_of_another_form_are_the_input():
    for arguments in ('{"text": "x"}', '{"input": 5}', "plain text", "{}"):
        assert decoded(list(arguments)) == arguments


def test_the_function_that_the_model_sees():
    tool = custom_tool("patch", "Patches", "tools[0]")
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert json.loads(input_arguments('a"é')) == {"input": 'a"é'} and "é" in input_arguments("é")


@pytest.mark.parametrize(
    "value, grammar",
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "grammar", "syntax": "lark", "definition": "x"}, Grammar("lark", "x")),
        ({"type": "grammar", "grammar": {"syntax": "regex", "definition": "x"}}, Grammar("regex", "x")),
    ],
)
def test_formats(value, grammar):
    assert parse_format(value, "f") == grammar


@pytest.mark.parametrize(
    "value, param", [(5, "f"), ({}, "f"), ({"type": "grammar", "grammar": {}}, "f.grammar.syntax")]
)
def test_wrong_formats(value, param):
    with pytest.raises(BadRequest) as error:
        parse_format(value, "f")
    assert error.value.param == param
