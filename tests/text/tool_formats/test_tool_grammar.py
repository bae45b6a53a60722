"""Grammars of calls: llguidance takes them, and whatever it lets through is read as calls that fit their schemas."""

from __future__ import annotations

import json
import random
from functools import cache

import jsonschema
import llguidance
import pytest
import tokenizers
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import decoders, models, pre_tokenizers

from millstream.text.output import Message, Output
from millstream.text.style import REASONING, Style
from millstream.text.tool_formats.registry import FORMATS
from millstream.text.tool_grammar import MOST_CALLS, tool_grammar
from millstream.text.tool_prompt import write_calls
from millstream.types import ToolUse

END = 256
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"north": {"type": "number"}}, "additionalProperties": False}},
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
USE = ToolUse((WEATHER, NOW), "required")
INNER = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<think>", "</think>"]


def style(name: str) -> Style:
    form = FORMATS[name]
    return Style(form, form.reasoning or REASONING["think"])


@cache
def vocabulary(name: str, special: bool) -> tuple[tokenizers.Tokenizer, llguidance.LLTokenizer]:
    """A token a byte, and with `special` one for each marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    form = FORMATS[name]
    marks = [mark for block in form.blocks for mark in (block.start, *block.ends)] + [*form.inner, *INNER]
    whole = {mark for mark in marks if mark[0] in "<[" and mark[-1] in ">]" and " " not in mark}
    made.add_special_tokens(["<|endoftext|>", *sorted(whole if special else ())])
    return made, llguidance.LLTokenizer(made.to_str(), eos_token=END)


def matcher(name: str, special: bool, use: ToolUse = USE, **more: object) -> llguidance.LLMatcher:
    made, tokens = vocabulary(name, special)
    added = {token.content: number for number, token in made.get_added_tokens_decoder().items()}
    grammar = tool_grammar(FORMATS[name], use, added, **more)  # type: ignore[arg-type]
    source = llguidance.LLMatcher.grammar_from_lark(grammar.source)
    assert not llguidance.LLMatcher.validate_grammar(source, tokens), grammar.source
    return llguidance.LLMatcher(tokens, source)


def accepts(name: str, special: bool, text: str, use: ToolUse = USE, **more: object) -> bool:
    subject = matcher(name, special, use, **more)
    ids = vocabulary(name, special)[0].encode(text).ids
    return subject.try_consume_tokens(ids) == len(ids) and subject.is_accepting()


def walk(name: str, special: bool, seed: int) -> str | None:
    """A text that the grammar lets through, drawn at random; None if it did not come to an end."""
    made, tokens = vocabulary(name, special)
    subject = matcher(name, special, reasoning=style(name).reasoning)
    draw = random.Random(seed)
    mask = allocate_token_bitmask(1, tokens.vocab_size)
    ids: list[int] = []
    while not subject.is_stopped() and len(ids) < 400:
        fill_next_token_bitmask(subject, mask, 0)
        allowed = [token for token in range(tokens.vocab_size) if mask[0][token // 32] >> (token % 32) & 1]
        markers = [token for token in allowed if token >= END]
        token = draw.choice(markers if markers and draw.random() < 0.4 else allowed)
        if token == END:
            break
        ids.append(token)
        assert subject.consume_token(token)
    return made.decode(ids, skip_special_tokens=False) if subject.is_accepting() or subject.is_stopped() else None


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_as_the_format_writes_them_are_accepted(name: str, special: bool) -> None:
    written = FORMATS[name].written
    weather = ("get_weather", {"city": "Oslo", "unit": "celsius"})
    full = ("get_weather", {"city": "São Paulo, BR", "days": 3, "unit": "fahrenheit", "place": {"north": 1.5}})
    for calls in ([weather], [full], [("now", {})]):
        assert accepts(name, special, write_calls(written, calls)), write_calls(written, calls)
    two = write_calls(written, [weather, ("now", {})])
    assert accepts(name, special, two) == written.many
    assert not accepts(name, special, two, ToolUse(USE.tools, "required", parallel=False))
    assert not accepts(name, special, write_calls(written, [("now", {})] * (MOST_CALLS + 1)))
    named = ToolUse(USE.tools, "required", "now")
    assert accepts(name, special, write_calls(written, [("now", {})]), named)
    assert not accepts(name, special, write_calls(written, [weather]), named)
    assert not accepts(name, special, write_calls(written, [("get_weather", {"city": "Oslo"})])), "unit is missing"
    assert not accepts(name, special, write_calls(written, [("get_weather", {"city": "x", "unit": "kelvin"})]))
    assert not accepts(name, special, "I would rather talk.")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_thoughts_may_come_before(name: str, special: bool) -> None:
    marks = style(name).reasoning
    assert marks is not None
    call = write_calls(FORMATS[name].written, [("now", {})])
    thought = f"Hm.\nYes.{marks.closes[0]}{marks.after}"
    assert accepts(name, special, f"{marks.opens[0]}{thought}\n\n{call}", reasoning=marks)
    assert accepts(name, special, call, reasoning=marks)
    assert accepts(name, special, thought + call, reasoning=marks, thinking=True)
    assert not accepts(name, special, call, reasoning=marks, thinking=True)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_what_it_lets_through_is_read_as_valid_calls(name: str, special: bool, whole: bool) -> None:
    schemas = USE.schemas
    for seed in range(8 if whole else 3):
        text = walk(name, special, seed)
        if text is None:
            continue
        output = Output(style(name), schemas)
        message = Message()
        message.add(output.push(text))
        message.add(output.finish())
        assert message.calls and not message.content, (text, message)
        for called, arguments in message.calls:
            jsonschema.validate(json.loads(arguments), schemas[called])
