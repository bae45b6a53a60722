"""Grammars of clients: which are supported, which are refused with which message, and the cache of compiled ones."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from llguidance.numpy import fill_next_token_bitmask
from small_tokenizers import byte_fallback, byte_level, merged_names, unigram

from millstream.errors import BadRequest, ModelError
from millstream.exact_json import loads
from millstream.text.grammars.check import check_grammar
from millstream.text.grammars.grammar import MAX_CACHED, MAX_CACHED_BYTES, GrammarCompiler, vocabulary
from millstream.text.loading import load_tokenizer
from millstream.text.tokenizer import Tokenizer
from millstream.types import Grammar
from support.schemas import random_schema
from support.tiny import byte_source


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(byte_source(tmp_path_factory.mktemp("bytes")))


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer)


def schema(**keywords: object) -> Grammar:
    return Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": keywords}, "required": ["a"]}))


LOOSE = Grammar(
    "json_schema", json.dumps({"x-guidance": {"whitespace_flexible": True}, "type": "array", "items": {"type": "null"}})
)
UNSUPPORTED = [
    ({"type": "array", "contains": {"type": "string"}}, '"contains"'),
    ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, '"propertyNames"'),
    ({"not": {"type": "string"}}, '"not"'),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, '"if", "then"'),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, '"dependentRequired"'),
    ({"type": "array", "unevaluatedItems": False}, '"unevaluatedItems"'),
    ({"type": "string", "format": "colour"}, '"format" with colour'),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, '"oneOf"'),
    ({"type": "string", "pattern": "^(?=a)b"}, '"pattern"'),
    ({"$ref": "http://example.com/schema"}, "http://example.com/schema"),
    ({"$ref": "#/definitions/none"}, "/definitions/none"),
    ({"type": "wurst"}, "wurst"),
    ({"type": "integer", "minimum": 3, "maximum": 1}, "unsatisfiable"),
]


@pytest.mark.parametrize(("keywords", "message"), UNSUPPORTED, ids=[message for _, message in UNSUPPORTED])
def test_an_unsupported_schema_is_refused_by_its_keyword(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_grammar(schema(**keywords))
    assert message in refused.value.message
    assert refused.value.message.startswith("the JSON schema ")


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "(a"), "the regular expression cannot be compiled"),
        (Grammar("lark", "start: nothing"), "nothing"),
        (Grammar("lark", "no grammar {"), "the grammar cannot be compiled"),
        (Grammar("gbnf", "root ::= nothing"), "nothing"),
        (Grammar("gbnf", 'first ::= "a"'), "root"),
        (Grammar("gbnf", 'root ::= "a'), "the GBNF grammar cannot be parsed"),
        (Grammar("json_schema", "[]"), "the JSON schema cannot be compiled"),
    ],
)
def test_other_grammars_are_refused_with_a_message(grammar: Grammar, message: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_grammar(grammar)
    assert message in refused.value.message


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """True if the text is a complete match."""
    matcher = compiler.matcher(grammar)
    tokens = tokenizer.encode(text, special=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar("regex", "[a-c]{2}/x"), ["ab/x"], ["ab", "ad/x", "ab/xx"]),
        (Grammar("lark", 'start: "yes" | "no\\n\\u00e9"'), ["yes", "no\né"], ["no", "yesno"]),
        (Grammar("gbnf", 'root ::= item ("," item)*\nitem ::= [0-9]+'), ["1", "1,22"], ["1,", "a"]),
        (schema(type="integer", minimum=3, maximum=12), ['{"a":3}', '{"a": 12}'], ['{"a":2}', '{"a":13}', '{"a":  3}']),
        (schema(enum=["x", 1, None]), ['{"a":"x"}', '{"a":1}', '{"a":null}'], ['{"a":"y"}', "{}", '{\n"a":1}']),
        (
            LOOSE,
            ["[null]", "[ null ,\n null ]"],
            ["[nul]"],
        ),
    ],
)
def test_what_matches(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, right: list[str], wrong: list[str]
) -> None:
    grammar = check_grammar(grammar)
    assert [text for text in right if not accepts(compiler, tokenizer, grammar, text)] == []
    assert [text for text in wrong if accepts(compiler, tokenizer, grammar, text)] == []


def walked(compiler: GrammarCompiler, grammar: Grammar) -> list[int]:
    """The tokens of a random answer that the masks allow."""
    matcher, draw = compiler.matcher(grammar), random.Random(0)
    tokens: list[int] = []
    while not matcher.is_stopped():
        mask = np.zeros((1, (compiler.vocab_size + 31) // 32), dtype=np.int32)
        fill_next_token_bitmask(matcher, mask, 0)
        tokens.append(draw.choice([i for i in range(compiler.vocab_size) if mask[0][i // 32] >> (i % 32) & 1]))
        assert matcher.consume_token(tokens[-1]), matcher.get_error()
    return tokens


@pytest.mark.parametrize("make", [byte_level, byte_fallback, unigram, merged_names])
def test_text_that_names_an_added_token_is_text(make: Callable[[], tokenizers.Tokenizer]) -> None:
    """Whether the model's own vocabulary has the name, too, or its merges make it."""
    backend = make()
    backend.add_special_tokens(["<|stop|>"])
    eos = backend.token_to_id("<|stop|>")
    tokenizer = Tokenizer(backend, eos_ids=[eos])
    compiler = GrammarCompiler(lambda: tokenizer)
    for name, number in tokenizer.added_tokens.items():
        for text, grammar in (
            (f'"{name} a"', Grammar("json_schema", json.dumps({"const": f"{name} a"}))),
            (f"{name}b", Grammar("regex", re.escape(name) + "b")),
        ):
            tokens = [token for token in walked(compiler, grammar) if token != eos]
            assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == text
            assert set(tokens).isdisjoint(tokenizer.added_tokens.values())
        for reference in (name, f"<[{number}]>"):
            assert walked(compiler, Grammar("lark", f'start: "<" {reference} "{name}" // <y>'))[1] == number


EDGES = [2**power + step for power in (31, 53, 63, 64, 70) for step in (-2, -1, 0, 1)]
SIGNED = [sign * edge for edge in EDGES for sign in (1, -1)]
INTEGERS = st.one_of(st.sampled_from(SIGNED), st.integers(-(10**22), 10**22))


@settings(max_examples=60, deadline=None)
@given(low=INTEGERS, more=st.one_of(st.integers(0, 3), st.integers(0, 10**20)), exclusive=st.booleans())
def test_no_answer_exceeds_the_limits_of_a_schema(tokenizer: Tokenizer, low: int, more: int, exclusive: bool) -> None:
    compiler = GrammarCompiler(lambda: tokenizer)
    least = {"exclusiveMinimum": low - 1} if exclusive else {"minimum": low}
    for schema in ({"type": "integer", **least, "maximum": low + more}, {"enum": [low, [low + more]]}, {"const": low}):
        try:
            grammar = check_grammar(Grammar("json_schema", json.dumps(schema)))
        except BadRequest as error:
            assert "cannot enforce exactly" in error.message
            assert max(abs(low - 1), abs(low + more)) >= 2**53
            continue
        tokens = [token for token in walked(compiler, grammar) if token < 256]
        answer = loads(tokenizer.decode(tokens))
        assert answer in schema.get("enum", [low]) if "type" not in schema else low <= answer <= low + more


@pytest.mark.parametrize("kind", ["json_schema", "lark"])
def test_a_number_that_cannot_be_enforced_is_named(kind: Literal["json_schema", "lark"]) -> None:
    """llguidance would let the answer have another number."""
    for schema, found in (
        ('{"const": 18446744073709551616}', "18446744073709551616 as 'const'"),
        ('{"properties": {"const": {"enum": ["x", {"y": [9007199254740993]}]}}}', "9007199254740993 as 'enum'"),
        ('{"anyOf": [{"type": "integer", "minimum": -9223372036854775808}]}', "-9223372036854775808 as 'minimum'"),
        ('{"const": 3.14159265358979323846}', "3.14159265358979323846 as 'const'"),
        ('{"const": 1e400}', "1e400 as 'const'"),
    ):
        source = schema if kind == "json_schema" else f'start: "%json" value\nvalue: %json {schema}'
        with pytest.raises(BadRequest) as refused:
            check_grammar(Grammar(kind, source))
        assert found in refused.value.message
    for schema in ('{"const": 1E5, "default": 0.10}', '{"type": "integer", "maximum": 18446744073709551615}'):
        check_grammar(Grammar("json_schema", schema))


def test_matchers_of_one_grammar_are_independent(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first, second = (compiler.matcher(Grammar("regex", "ab")) for _ in range(2))
    assert first.consume_tokens(tokenizer.encode("ab", special=False))
    assert first.is_accepting()
    assert not second.is_accepting()
    assert second.consume_tokens(tokenizer.encode("ab", special=False))


def test_the_cache_is_bounded_by_count(compiler: GrammarCompiler) -> None:
    for number in range(2 * MAX_CACHED):
        assert isinstance(compiler.matcher(Grammar("regex", f"a{{{number + 1}}}")), LLMatcher)
    assert len(compiler._cache) == MAX_CACHED


def test_the_cache_is_bounded_by_size(compiler: GrammarCompiler) -> None:
    large = [Grammar("regex", f"{number}" + "a|" * (MAX_CACHED_BYTES // 8)) for number in range(8)]
    for grammar in large:
        compiler.matcher(grammar)
    assert [compiler.knows(grammar) for grammar in large] == [False] * 5 + [True] * 3


def test_grammars_that_requests_wait_for_stay_cached_longer(compiler: GrammarCompiler) -> None:
    """If the owner had to compile it, all rows would wait."""
    waiting = [Grammar("regex", f"a{{{number + 1}}}") for number in range(2 * MAX_CACHED)]
    for grammar in waiting:
        compiler.prepare(grammar)
    assert all(map(compiler.knows, waiting))
    for grammar in waiting:
        compiler.matcher(grammar)
    assert len(compiler._cache) == MAX_CACHED


def test_a_full_lexer_is_not_reused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers of one grammar share the states of its lexer: one that fails would break all later ones."""
    limits = LLParserLimits(max_lexer_states=1_500, verbose_errors=False)
    monkeypatch.setattr("millstream.text.grammars.grammar.LIMITS", limits)
    compiler = GrammarCompiler(lambda: tokenizer)
    grammar = Grammar("regex", ".*a.{200}b")

    def length(matcher: LLMatcher) -> int:
        rng, count = random.Random(1), 0
        matcher.compute_bitmask()
        while not matcher.is_error() and count < 2_000:
            matcher.consume_token(rng.choice(tokenizer.encode("ab", special=False)))
            matcher.compute_bitmask()
            count += 1
        return count

    first = length(compiler.matcher(grammar))
    assert 0 < first < 2_000
    assert length(compiler.matcher(grammar)) == 0, "llguidance no longer shares lexers: `forget` can be removed"
    compiler.forget(grammar)
    assert length(compiler.matcher(grammar)) == first


def test_a_rejected_grammar_is_not_compiled_again(compiler: GrammarCompiler) -> None:
    wrong = Grammar("lark", "start: <[299999]>")
    for _ in range(2):
        with pytest.raises(ValueError, match="299999"):
            compiler.matcher(wrong)
    assert not compiler.knows(wrong)


def test_the_vocabulary_is_built_once_at_first_use(tokenizer: Tokenizer) -> None:
    loads = []

    def load() -> Tokenizer:
        loads.append(1)
        return tokenizer

    compiler = GrammarCompiler(load)
    assert loads == []
    assert compiler.vocab_size == tokenizer.vocab_size
    compiler.matcher(Grammar("regex", "a"))
    assert loads == [1]


def test_eos_tokens_are_those_of_the_tokenizer(tokenizer: Tokenizer) -> None:
    assert set(vocabulary(tokenizer).eos_tokens) == tokenizer.eos_ids


def test_an_unsupported_tokenizer_raises(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import models

    word_level = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), eos_ids=[1])
    with pytest.raises(ModelError, match="cannot be used with structured output"):
        vocabulary(word_level)


def walk(matcher: LLMatcher, vocab_size: int, end: int, rng: random.Random, limit: int) -> list[int] | None:
    """Returns random tokens that the grammar allows, to its end; None if there are more than the limit."""
    bits = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    tokens: list[int] = []
    while len(tokens) < limit:
        fill_next_token_bitmask(matcher, bits)
        options = np.nonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[0].tolist()
        assert not matcher.is_error(), matcher.get_error()
        token = rng.choice(options)
        if token == end:
            return tokens
        assert matcher.consume_token(token)
        tokens.append(token)
    return None


def test_all_output_that_the_masks_allow_is_valid(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Random tokens reach corners that no model reaches."""
    [end] = tokenizer.eos_ids
    ended = 0
    for seed in range(300):
        wanted = random_schema(seed)
        matcher = compiler.matcher(check_grammar(Grammar("json_schema", json.dumps(wanted))))
        tokens = walk(matcher, tokenizer.vocab_size, end, random.Random(seed), 600)
        if tokens is not None:
            ended += 1
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), wanted, jsonschema.Draft202012Validator)
    assert ended > 250
