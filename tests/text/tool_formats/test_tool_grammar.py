"""Grammars of forced calls: llguidance accepts them, and all text that they allow parses to valid calls."""

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

from millstream.text.chat_format import REASONING, ChatFormat
from millstream.text.output_parser import Message, OutputParser
from millstream.text.tool_formats.registry import FORMATS
from millstream.text.tool_grammar import MAX_CALLS, tool_grammar
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


def chat_format(name: str) -> ChatFormat:
    form = FORMATS[name]
    return ChatFormat(form, form.reasoning or REASONING["think"])


@cache
def vocabulary(name: str, special: bool) -> tuple[tokenizers.Tokenizer, llguidance.LLTokenizer]:
    """Returns a vocabulary with one token per byte, and with `special` one per marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    form = FORMATS[name]
    markers = [marker for block in form.blocks for marker in (block.start, *block.ends)] + [*form.inner_markers, *INNER]
    single_tokens = {marker for marker in markers if marker[0] in "<[" and marker[-1] in ">]" and " " not in marker}
    made.add_special_tokens(["<|endoftext|>", *sorted(single_tokens if special else ())])
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
    """Returns a random text that the grammar allows; None if it did not end."""
    made, tokens = vocabulary(name, special)
    subject = matcher(name, special, reasoning=chat_format(name).reasoning)
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
    syntax = FORMATS[name].syntax
    weather = ("get_weather", {"city": "Oslo", "unit": "celsius"})
    full = ("get_weather", {"city": "São Paulo, BR", "days": 3, "unit": "fahrenheit", "place": {"north": 1.5}})
    for calls in ([weather], [full], [("now", {})]):
        assert accepts(name, special, write_calls(syntax, calls)), write_calls(syntax, calls)
    two = write_calls(syntax, [weather, ("now", {})])
    assert accepts(name, special, two) == syntax.many
    assert not accepts(name, special, two, ToolUse(USE.tools, "required", parallel=False))
    assert not accepts(name, special, write_calls(syntax, [("now", {})] * (MAX_CALLS + 1)))
    named = ToolUse(USE.tools, "required", "now")
    assert accepts(name, special, write_calls(syntax, [("now", {})]), named)
    assert not accepts(name, special, write_calls(syntax, [weather]), named)
    assert not accepts(name, special, write_calls(syntax, [("get_weather", {"city": "Oslo"})])), "unit is missing"
    assert not accepts(name, special, write_calls(syntax, [("get_weather", {"city": "x", "unit": "kelvin"})]))
    assert not accepts(name, special, "I would rather talk.")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_reasoning_may_precede_the_calls(name: str, special: bool) -> None:
    markers = chat_format(name).reasoning
    assert markers is not None
    call = write_calls(FORMATS[name].syntax, [("now", {})])
    reasoning = f"Hm.\nYes.{markers.closes[0]}{markers.after}"
    assert accepts(name, special, f"{markers.opens[0]}{reasoning}\n\n{call}", reasoning=markers)
    assert accepts(name, special, call, reasoning=markers)
    assert accepts(name, special, reasoning + call, reasoning=markers, in_reasoning=True)
    assert not accepts(name, special, call, reasoning=markers, in_reasoning=True)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_all_text_that_it_allows_parses_to_valid_calls(name: str, special: bool, whole: bool) -> None:
    schemas = USE.schemas
    for seed in range(8 if whole else 3):
        text = walk(name, special, seed)
        if text is None:
            continue
        output = OutputParser(chat_format(name), schemas)
        message = Message()
        message.add(output.push(text))
        message.add(output.finish())
        assert message.calls and not message.content, (text, message)
        for called, arguments in message.calls:
            jsonschema.validate(json.loads(arguments), schemas[called])
