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

from millstream.errors import BadRequest
from millstream.text.chat_format import REASONING, ChatFormat
from millstream.text.grammars.grammar import vocabulary as grammar_vocabulary
from millstream.text.grammars.tools import MAX_CALLS, free_grammar, tool_grammar
from millstream.text.output.parser import Message, OutputParser
from millstream.text.templates.tool_prompt import write_calls
from millstream.text.tokenizer import Tokenizer
from millstream.text.tool_formats.registry import FORMATS
from millstream.types import Grammar, ToolUse

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
    return made, grammar_vocabulary(Tokenizer(made, eos_ids=[END]))


MATCHERS: dict[tuple[str, bool, str], llguidance.LLMatcher] = {}


def matcher(name: str, special: bool, use: ToolUse = USE, **more: object) -> llguidance.LLMatcher:
    key = (name, special, repr((use, more)))
    if key not in MATCHERS:
        made, tokens = vocabulary(name, special)
        added = {token.content: number for number, token in made.get_added_tokens_decoder().items()}
        build = tool_grammar if use.choice == "required" else free_grammar
        grammar = build(FORMATS[name], use, added, **more)  # type: ignore[arg-type]
        assert grammar is not None
        source = llguidance.LLMatcher.grammar_from_lark(grammar.source)
        MATCHERS[key] = llguidance.LLMatcher(tokens, source, log_level=0)
        assert not MATCHERS[key].is_error(), (MATCHERS[key].get_error(), grammar.source)
    return MATCHERS[key].deep_copy()


def accepts(name: str, special: bool, text: str, use: ToolUse = USE, **more: object) -> bool:
    subject = matcher(name, special, use, **more)
    ids = vocabulary(name, special)[0].encode(text).ids
    return subject.try_consume_tokens(ids) == len(ids) and subject.is_accepting()


def allowed_tokens(name: str, special: bool, text: str, **more: object) -> set[int]:
    """Returns the tokens that may follow `text`."""
    made, tokens = vocabulary(name, special)
    subject = matcher(name, special, **more)
    assert subject.consume_tokens(made.encode(text).ids)
    mask = allocate_token_bitmask(1, tokens.vocab_size)
    fill_next_token_bitmask(subject, mask, 0)
    return {token for token in range(tokens.vocab_size) if mask[0][token // 32] >> (token % 32) & 1}


def walk(name: str, special: bool, seed: int, use: ToolUse = USE, **more: object) -> list[int] | None:
    """Returns the tokens of a random text that the grammar allows; None if it did not end."""
    tokens = vocabulary(name, special)[1]
    subject = matcher(name, special, use, **more)
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
    return ids if subject.is_accepting() or subject.is_stopped() else None


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


def endings(name: str, text: str) -> list[str]:
    """Returns complete calls as models end them: with the white space, or all, of what stands between two calls."""
    syntax = FORMATS[name].syntax
    if syntax.closing:
        calls = text.removesuffix(syntax.closing)
        return [text, f"{text}\n", f"{calls}\n{syntax.closing}", f"{calls} {syntax.closing}\n\n"]
    prefixes = [syntax.between[:length] for length in range(len(syntax.between) + 1)]
    return [text + end for end in {*prefixes, "\n", "\n\n", " ", " \n"}]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_may_end_wherever_its_calls_are_complete(name: str, special: bool) -> None:
    """A model that wants to end must not have to call again: it would repeat its call."""
    syntax = FORMATS[name].syntax
    for calls in ([("now", {})], [("now", {})] * 2)[: 1 + syntax.many]:
        for text in endings(name, write_calls(syntax, calls)):
            assert END in allowed_tokens(name, special, text), text
            for pieces in ([text], list(text)):
                output = OutputParser(chat_format(name), USE.schemas)
                message = Message()
                for piece in pieces:
                    message.add(output.push(piece))
                message.add(output.finish())
                assert message == Message(calls=[("now", "{}")] * len(calls)), text


def test_an_answer_may_end_with_a_token_that_spans_the_end_of_a_call() -> None:
    """Vocabularies have tokens for two line breaks, and for the end of a tag with a line break."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate([*letters, "ĊĊ", ">Ċ", ">ĊĊ"])}
    made = tokenizers.Tokenizer(models.BPE(words, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    tokens = llguidance.LLTokenizer(made.to_str(), eos_token=len(words))
    source = llguidance.LLMatcher.grammar_from_lark(tool_grammar(FORMATS["hermes"], USE, {}).source)
    text = write_calls(FORMATS["hermes"].syntax, [("now", {})])
    for last in (">Ċ", ">ĊĊ"):
        subject = llguidance.LLMatcher(tokens, source)
        start = [words[letter] for letter in text[:-1].replace(" ", "Ġ").replace("\n", "Ċ")]
        assert subject.consume_tokens([*start, words[last]]) and subject.is_accepting()
    subject = llguidance.LLMatcher(tokens, source)
    assert subject.consume_tokens([*start, words[">"], words["ĊĊ"]]) and subject.is_accepting()


def test_an_answer_may_end_with_the_formats_own_stop_token() -> None:
    """Gemma 4 ends its calls with the token that opens a tool's response."""
    stop = vocabulary("gemma", True)[0].token_to_id("<think>")
    text = write_calls(FORMATS["gemma"].syntax, [("now", {})])
    assert stop not in allowed_tokens("gemma", True, text)
    assert stop in allowed_tokens("gemma", True, text, ends=[stop])
    assert stop not in allowed_tokens("gemma", True, text.removesuffix("<tool_call|>"), ends=[stop])


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
    # A budget closes it by force, wherever it is. A grammar that forbids that has the last word.
    assert accepts(name, special, f"Hm, <b>{markers.closing}{call}", reasoning=markers, in_reasoning=True)
    assert accepts(name, special, f"{markers.opens[0]}{markers.closing}{call}", reasoning=markers)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_all_text_that_it_allows_parses_to_valid_calls(name: str, special: bool, whole: bool) -> None:
    schemas = USE.schemas
    for seed in range(8 if whole else 3):
        ids = walk(name, special, seed, reasoning=chat_format(name).reasoning)
        if ids is None:
            continue
        text = vocabulary(name, special)[0].decode(ids, skip_special_tokens=False)
        output = OutputParser(chat_format(name), schemas)
        message = Message()
        message.add(output.push(text))
        message.add(output.finish())
        assert message.calls and not message.content, (text, message)
        for called, arguments in message.calls:
            jsonschema.validate(json.loads(arguments), schemas[called])


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_client_wrote_is_text_even_if_it_spells_a_marker(name: str) -> None:
    parameters = {"type": "object", "properties": {"t": {"enum": ["</think>"]}}, "required": ["t"]}
    function = {"name": "set", "parameters": parameters | {"additionalProperties": False}}
    ids = walk(name, True, 0, ToolUse(({"type": "function", "function": function},), "required"))
    assert ids is not None
    made = vocabulary(name, True)[0]
    output = OutputParser(chat_format(name), {"set": parameters})
    message = Message()
    message.add([*output.push(made.decode(ids, skip_special_tokens=False)), *output.finish()])
    assert message.calls[0] == ("set", '{"t": "</think>"}')
    # As a server decodes control tokens that are no markers of the format.
    assert "</think>" in made.decode(ids, skip_special_tokens=True)


EDIT = {
    "type": "function",
    "function": {"name": "edit", "parameters": {"type": "object", "properties": {"input": {"type": "string"}}}},
}
LINES = Grammar("lark", 'start: "BEGIN" LF line+ "END"\nline: ("+" | "-") /.*/ LF\n%import common.LF')
GOOD = 'BEGIN\n+a = "b\\n" </c>\n-\nEND'
FREE = ToolUse((EDIT, WEATHER, NOW), input_grammars=(("edit", LINES),))
FORCED = ToolUse(FREE.tools, "required", input_grammars=FREE.input_grammars)
WITHOUT_MARKERS = {"llama", "pythonic", "harmony"}
"""Formats whose calls cannot be told from text by one marker."""


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_the_input_of_a_tool_matches_its_grammar(name: str, special: bool) -> None:
    syntax = FORMATS[name].syntax
    for text, good in ((GOOD, True), (GOOD.replace("-", "*"), False), (GOOD + "\n", False), ("", False)):
        written = write_calls(syntax, [("edit", {"input": text})])
        assert accepts(name, special, written, FORCED) == good, written
    assert accepts(name, special, write_calls(syntax, [("now", {})]), FORCED)
    output = OutputParser(chat_format(name), FORCED.schemas)
    message = Message()
    message.add([*output.push(write_calls(syntax, [("edit", {"input": GOOD})])), *output.finish()])
    assert [(called, json.loads(arguments)) for called, arguments in message.calls] == [("edit", {"input": GOOD})]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", sorted(FORMATS.keys() - WITHOUT_MARKERS))
def test_text_stays_free_where_a_call_is_not_required(name: str, special: bool) -> None:
    syntax = FORMATS[name].syntax
    good, bad = (write_calls(syntax, [("edit", {"input": text})]) for text in (GOOD, "BEGIN\nEND"))
    other = write_calls(syntax, [("get_weather", {"unit": 5, "more": [1]})])
    for text in (
        "",
        "Hello.\n\n{[<",
        good,
        f"I edit.\n{good}",
        f"{good}\nDone.",
        f"{good}\n{good}",
        other,
        other + good,
    ):
        assert accepts(name, special, text, FREE), text
        assert END in allowed_tokens(name, special, text, use=FREE)
    assert not accepts(name, special, bad, FREE)
    assert not accepts(name, special, f"{other}\nI edit.\n{bad}", FREE)
    markers = chat_format(name).reasoning
    assert markers is not None
    for text, good_text in ((f"\n\nHello.{good}", True), ("Hello.", True), ("", True), (f"x{bad}", False)):
        reasoning = f"Hm.{markers.closes[0]}{markers.after}{text}"
        assert accepts(name, special, reasoning, FREE, reasoning=markers, in_reasoning=True) == good_text, text
        assert accepts(name, special, markers.opens[0] + reasoning, FREE, reasoning=markers) == good_text, text
    assert accepts(name, special, f"Hello.{good}", FREE, reasoning=markers)


ANSWER = Grammar("json_schema", '{"properties": {"a": {"type": "integer"}}, "required": ["a"]}')


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", sorted(FORMATS.keys() - WITHOUT_MARKERS))
def test_structured_output_beside_tools_is_a_call_or_an_answer_of_that_structure(name: str, special: bool) -> None:
    syntax = FORMATS[name].syntax
    call = write_calls(syntax, [("get_weather", {"city": "Oslo", "unit": "celsius"})])
    use = ToolUse(USE.tools, "auto")
    for text in ('{"a": 1}', call, f"{call}\n{call}", f"\n{call}\n"):
        assert accepts(name, special, text, use, answer=ANSWER), text
    for text in ("", "Hello.", '{"a": "1"}', f"Hello.{call}", call + '{"a": 1}', call.replace("get_weather", "other")):
        assert not accepts(name, special, text, use, answer=ANSWER), text


@pytest.mark.parametrize("name", sorted(WITHOUT_MARKERS))
def test_a_format_without_markers_is_not_enforced_where_a_call_is_not_required(name: str) -> None:
    added = {token.content: number for number, token in vocabulary(name, True)[0].get_added_tokens_decoder().items()}
    assert free_grammar(FORMATS[name], FREE, added) is None


@pytest.mark.parametrize("name", FORMATS)
def test_only_allowed_tools_may_be_called(name: str) -> None:
    syntax = FORMATS[name].syntax
    weather = write_calls(syntax, [("get_weather", {"city": "Oslo", "unit": "celsius"})])
    allowed = ToolUse(USE.tools, "required", allowed=frozenset({"now"}))
    assert accepts(name, True, write_calls(syntax, [("now", {})]), allowed)
    assert not accepts(name, True, weather, allowed)
    for wrong in (ToolUse(USE.tools, "required", "get_weather", allowed=frozenset({"now"})), ToolUse((), "required")):
        with pytest.raises(BadRequest, match="allowed tools"):
            tool_grammar(FORMATS[name], wrong, {})


def test_a_grammar_that_cannot_be_enforced_names_its_tool() -> None:
    for use in (FORCED, FREE):
        wrong = ToolUse(use.tools, use.choice, input_grammars=(("edit", Grammar("regex", "^a")),))
        with pytest.raises(BadRequest, match="'edit'"):
            (tool_grammar if use.choice == "required" else free_grammar)(FORMATS["hermes"], wrong, {})
