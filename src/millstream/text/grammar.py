"""What an answer must match, as llguidance takes it: checked for clients, and compiled for a model's vocabulary."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from millstream.errors import BadRequest, ModelError
from millstream.models.source import ModelSource
from millstream.text.loading import load_tokenizer
from millstream.text.tokenizer import Tokenizer
from millstream.types import Grammar

COMPACT = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
"""White space between the parts of JSON: one space where people write one. A small model that may write as much as it
likes can go on until its limit. A schema's own `x-guidance` goes before this."""

MOST_KEPT = 32
"""Compiled grammars that a model keeps: agents send the same few with every request."""

_UNSERVED_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_TITLES = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}


def checked(grammar: Grammar) -> Grammar:
    """The grammar as an engine takes it. Raises `BadRequest` that says what of it cannot be served.

    Compiles it without a vocabulary: that takes a millisecond or so, and a vocabulary about a second to build.
    """
    if grammar.kind == "gbnf":
        grammar = Grammar("lark", _from_gbnf(grammar.source))
    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(_source(grammar))
    except ValueError as error:
        raise BadRequest(f"{_TITLES[grammar.kind]} cannot be served: {error}") from error
    if failed:
        raise BadRequest(_in_words(grammar, messages[0].strip()))
    return grammar


class _ReadingGbnf:
    """Turns what the converter raises into `BadRequest`: an error of its own, or `Exception` itself and no subclass."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception or kind is GbnfToLarkError or kind is RecursionError:
            raise BadRequest(f"the GBNF grammar cannot be read: {error}") from error


def _from_gbnf(source: str) -> str:
    with _ReadingGbnf():
        return gbnf_to_lark(source)


def _in_words(grammar: Grammar, message: str) -> str:
    title = _TITLES[grammar.kind]
    if found := _UNSERVED_KEYS.search(message):
        return f"{title} uses {found[1]}, which this server cannot enforce. Leave it out, or say it in another way."
    if message.startswith("Unknown format:"):
        return f'{title} uses "format" with{message.removeprefix("Unknown format:")}, which this server cannot enforce.'
    if message.startswith("oneOf"):
        return f'{title} uses "oneOf" with options that may both match; use "anyOf" if that is no harm.'
    if grammar.kind == "json_schema" and message.startswith("regex parse error"):
        return f'{title} has a "pattern" that cannot be served: {message}'
    return f"{title} cannot be served: {message}"


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.source, defaults=COMPACT)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case _:
            return LLMatcher.grammar_from_lark(grammar.source)


def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """The tokenizer as llguidance wants it: its tokens as a tree of bytes, and where an answer ends."""
    ends = sorted(token for token in tokenizer.eos_ids if token < tokenizer.vocab_size)
    try:
        return LLTokenizer(tokenizer.as_json(), eos_token=ends)
    except ValueError as error:
        raise ModelError(f"this model's tokenizer cannot be used with grammars: {error}") from error


class GrammarCompiler:
    """Matchers for one model. Its vocabulary is built when it is first wanted, and if that fails, it fails for good.

    One thread may `prepare` while another takes matchers, once the vocabulary is there: what both do to the table at
    once costs a second compilation at most.
    """

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._vocabulary: LLTokenizer | None = None
        self._failure: str | None = None
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    @property
    def vocab_size(self) -> int:
        return self._ready().vocab_size

    def knows(self, grammar: Grammar) -> bool:
        return grammar in self._kept

    def prepare(self, grammar: Grammar | None = None) -> None:
        """Build the vocabulary, and compile a grammar. Raises as `matcher` does."""
        self._ready()
        if grammar is not None:
            self._compiled(grammar)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A fresh one. Raises `ValueError` for a grammar that cannot be compiled, `ModelError` if none can be."""
        return self._compiled(grammar).deep_copy()

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        made = self._kept.pop(grammar, None)
        if made is None:
            made = LLMatcher(self._ready(), _source(grammar), log_level=0)
            if made.is_error():
                raise ValueError(first_line(made.get_error()))
        self._kept[grammar] = made
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return made

    def _ready(self) -> LLTokenizer:
        if self._failure is not None:
            raise ModelError(self._failure)
        if self._vocabulary is None:
            try:
                self._vocabulary = vocabulary(self._load())
            except ModelError as error:
                self._failure = error.message
                raise
        return self._vocabulary


def compiler_of(source: ModelSource) -> GrammarCompiler:
    return GrammarCompiler(lambda: load_tokenizer(source))


def first_line(message: str) -> str:
    """llguidance adds pages of state to what it says."""
    return message.strip().split("\n", 1)[0]
