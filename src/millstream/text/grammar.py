"""Grammars compiled for a model's vocabulary, in its engine. They were checked before: see `grammar_check`."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

from millstream.errors import ModelError
from millstream.models.source import ModelSource
from millstream.text.grammar_source import LIMITS, first_line, in_words, source_of
from millstream.text.loading import load_tokenizer
from millstream.text.tokenizer import Tokenizer
from millstream.types import Grammar

MOST_KEPT = 32
"""Compiled grammars that a model keeps: agents send the same few with every request."""
MOST_KEPT_BYTES = 262_144
"""Of their sources: a compiled grammar takes up to 200 bytes for each."""
WAITING_SHARE = 8
"""How many times as much is kept while requests may wait for a row with it."""
WAITING_SECONDS = 120.0


def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """The tokenizer as llguidance wants it: its tokens as a tree of bytes, and where an answer ends."""
    ends = sorted(token for token in tokenizer.eos_ids if token < tokenizer.vocab_size)
    try:
        return LLTokenizer(tokenizer.as_json(), eos_token=ends)
    except ValueError as error:
        raise ModelError(f"this model's tokenizer cannot be used with grammars: {error}") from error


class _Kept(NamedTuple):
    matcher: LLMatcher
    wanted_until: float
    """On the monotonic clock: a request may wait for a row with it."""


class GrammarCompiler:
    """Matchers for one model. Its vocabulary is built when it is first wanted, and if that fails, it fails for good.

    One thread may `prepare` while another takes matchers, once the vocabulary is there: what both do to the table at
    once costs a second compilation at most. Matchers of one grammar share what its lexer has learnt, and the limit on
    that too: once one of them fails, the grammar must be compiled anew (`forget`).
    """

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._vocabulary: LLTokenizer | None = None
        self._failure: str | None = None
        self._kept: OrderedDict[Grammar, _Kept] = OrderedDict()
        self._unfit: OrderedDict[Grammar, str] = OrderedDict()

    @property
    def vocab_size(self) -> int:
        return self._ready().vocab_size

    def knows(self, grammar: Grammar) -> bool:
        return grammar in self._kept

    def prepare(self, grammar: Grammar | None = None) -> None:
        """Build the vocabulary, and compile a grammar. Raises as `matcher` does."""
        self._ready()
        if grammar is not None:
            self._compiled(grammar, wanted_until=time.monotonic() + WAITING_SECONDS)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A fresh one. Raises `ValueError` for a grammar that cannot be compiled, `ModelError` if none can be."""
        return self._compiled(grammar, wanted_until=0.0).deep_copy()

    def forget(self, grammar: Grammar) -> None:
        """Compile it anew for the next who asks."""
        self._kept.pop(grammar, None)

    def _compiled(self, grammar: Grammar, wanted_until: float) -> LLMatcher:
        kept = self._kept.get(grammar)
        matcher = self._compile(grammar) if kept is None else kept.matcher
        self._kept[grammar] = _Kept(matcher, wanted_until)
        self._kept.move_to_end(grammar)
        self._evict()
        return matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if grammar in self._unfit:
            raise ValueError(self._unfit[grammar])
        made = LLMatcher(self._ready(), source_of(grammar), log_level=0, limits=LIMITS)
        first = made.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # what it learns serves the rows, and what fails here fails before there is one
        if first.is_error():
            self._unfit[grammar] = in_words(grammar, first_line(first.get_error()))
            if len(self._unfit) > MOST_KEPT:
                self._unfit.popitem(last=False)
            raise ValueError(self._unfit[grammar])
        return made

    def _evict(self) -> None:
        """The least recently used goes. One that a request waits for is spared for a while: the owner would have to
        compile it, and all rows would wait."""
        size = sum(len(grammar.source) for grammar in self._kept)
        for grammar, kept in list(self._kept.items())[:-1]:
            spared = WAITING_SHARE if kept.wanted_until > time.monotonic() else 1
            if len(self._kept) <= spared * MOST_KEPT and size <= spared * MOST_KEPT_BYTES:
                return
            self._kept.pop(grammar, None)
            size -= len(grammar.source)

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
