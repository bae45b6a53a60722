"""Compiles grammars for a model's vocabulary, and caches them; and reads what rows write. Runs in the engine.

The server has checked each grammar before: see `grammar_check`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import orjson
from llguidance import LLMatcher, LLTokenizer

from millstream.errors import ModelError
from millstream.models.source import ModelSource
from millstream.text.detokenizer import ByteDetokenizer, Detokenizer
from millstream.text.grammars.lark import with_token_ids
from millstream.text.grammars.source import LIMITS, explain_error, first_line, llguidance_source
from millstream.text.loading import load_tokenizer
from millstream.text.output.parser import ReasoningWatch
from millstream.text.tokenizer import TokenBytes, Tokenizer
from millstream.types import Grammar, ReasoningLimit

MAX_CACHED = 32
"""Compiled grammars in a model's cache: agents send the same few with every request."""
MAX_CACHED_BYTES = 262_144
"""Bytes of their sources. A compiled grammar takes up to 200 bytes per byte of source."""
WAITING_FACTOR = 8
"""The cache may hold this many times as much while requests wait for a row with their grammar."""
WAITING_SECONDS = 120.0
"""How long a prepared grammar counts as waited for."""


def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """Returns the tokenizer in llguidance's form: a trie of token bytes, and the EOS tokens.

    No text in it is the name of an added token: llguidance tokenizes the text that a grammar forces, and it would take
    a name for the token itself, which is no text to the grammar. So grammars refer to added tokens by their ids.
    Raises `ModelError` if llguidance does not support the tokenizer.
    """
    eos_tokens = sorted(token for token in tokenizer.eos_ids if token < tokenizer.vocab_size)
    try:
        return LLTokenizer(_without_names(tokenizer.as_json()), eos_token=eos_tokens)
    except ValueError as error:
        raise ModelError(f"this model's tokenizer cannot be used with structured output: {error}") from error


def _without_names(tokenizer: str) -> str:
    """Returns a tokenizer.json in which added tokens have names that no text contains, and their ids as before."""
    content: dict[str, Any] = orjson.loads(tokenizer)
    names = {token["content"]: f"\ufdd0{token['id']}\ufdd0" for token in content["added_tokens"]}
    for token in content["added_tokens"]:
        token["content"] = names[token["content"]]
    _rename_in_model(content["model"], names)
    return orjson.dumps(content).decode()


def _rename_in_model(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Renames tokens in the vocabulary of a tokenizer's model, which has the added tokens of some families, too."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        return
    if names.keys().isdisjoint(vocabulary):
        return
    model["vocab"] = {names.get(name, name): number for name, number in vocabulary.items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]


class _Vocabulary(NamedTuple):
    tokens: LLTokenizer
    added: Mapping[str, int]
    """The ids of added tokens by their names."""


class _Detokenizers:
    """Makes detokenizers from llguidance's tokenizer, so that the other one need not stay in memory: a large one takes
    100 MB. `shown`: special tokens that are not skipped."""

    def __init__(self, tokens: LLTokenizer, tokenizer: Tokenizer) -> None:
        self._tokens = tokens
        self._added = {token: tokenizer.token_bytes(token) for token in tokenizer.added_tokens.values()}
        self._special = frozenset(token for token in self._added if tokenizer.is_special(token))
        self._tables: dict[frozenset[int], TokenBytes] = {}

    def __call__(self, *, shown: frozenset[int]) -> Detokenizer:
        if shown not in self._tables:
            self._tables[shown] = TokenBytes(partial(self._bytes, self._special - shown))
        return ByteDetokenizer(self._tables[shown], 0)

    def _bytes(self, skipped: frozenset[int], token: int) -> bytes:
        if token in skipped or token >= self._tokens.vocab_size:
            return b""
        return self._added[token] if token in self._added else self._tokens.decode_bytes([token])


class _CachedGrammar(NamedTuple):
    matcher: LLMatcher
    needed_until: float
    """Monotonic time until which a request may be waiting for a row with it."""


class GrammarCompiler:
    """Compiles grammars for one model. The vocabulary is built at first use; if that fails, every later use fails, too.

    Once the vocabulary is built, one thread may `prepare` while another takes matchers: if both change the cache at the
    same time, the worst outcome is a second compilation. Matchers of one grammar share their lexer's states and the
    limit on them: once one of them fails, the grammar must be compiled again (`forget`).
    """

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._vocabulary: _Vocabulary | None = None
        self._load_error: str | None = None
        self._detokenizer: Callable[..., Detokenizer] | None = None
        self._cache: OrderedDict[Grammar, _CachedGrammar] = OrderedDict()
        self._rejected: OrderedDict[Grammar, str] = OrderedDict()

    @property
    def vocab_size(self) -> int:
        return self._loaded_vocabulary().tokens.vocab_size

    def knows(self, grammar: Grammar) -> bool:
        """True if the grammar is compiled and cached."""
        return grammar in self._cache

    def prepare(self, grammar: Grammar | None = None) -> None:
        """Builds the vocabulary and compiles a grammar ahead of its use. Raises as `matcher` does."""
        self._loaded_vocabulary()
        if grammar is not None:
            self._compiled(grammar, needed_until=time.monotonic() + WAITING_SECONDS)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Returns a new matcher. Raises `ValueError` if the grammar does not compile, `ModelError` if none can."""
        return self._compiled(grammar, needed_until=0.0).deep_copy()

    @property
    def reads_text(self) -> bool:
        """True if `watch` has nothing to load."""
        return self._detokenizer is not None

    def prepare_watch(self) -> None:
        """Loads the tokenizer ahead of `watch`. Raises `ModelError` if it cannot be loaded."""
        with suppress(ModelError):  # llguidance may not support a tokenizer that reads text well
            self._loaded_vocabulary()
        if self._detokenizer is None:
            raise ModelError(self._load_error or "the tokenizer cannot be loaded")

    def watch(self, limit: ReasoningLimit) -> ReasoningWatch:
        """Returns what follows a row's reasoning. Raises as `prepare_watch` does."""
        if self._detokenizer is None:
            self.prepare_watch()
        assert self._detokenizer is not None
        return ReasoningWatch(limit, partial(self._detokenizer, shown=limit.shown))

    def forget(self, grammar: Grammar) -> None:
        """Drops a grammar from the cache, so that its next use compiles it again."""
        self._cache.pop(grammar, None)

    def _compiled(self, grammar: Grammar, needed_until: float) -> LLMatcher:
        cached = self._cache.get(grammar)
        matcher = self._compile(grammar) if cached is None else cached.matcher
        self._cache[grammar] = _CachedGrammar(matcher, needed_until)
        self._cache.move_to_end(grammar)
        self._evict()
        return matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if grammar in self._rejected:
            raise ValueError(self._rejected[grammar])
        vocabulary = self._loaded_vocabulary()
        source = llguidance_source(with_token_ids(grammar, vocabulary.added))
        matcher = LLMatcher(vocabulary.tokens, source, log_level=0, limits=LIMITS)
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # fills the shared lexer, and finds errors before the request has a row
        if first.is_error():
            self._rejected[grammar] = explain_error(grammar, first_line(first.get_error()))
            if len(self._rejected) > MAX_CACHED:
                self._rejected.popitem(last=False)
            raise ValueError(self._rejected[grammar])
        return matcher

    def _evict(self) -> None:
        """Evicts the least recently used grammars. Those that a request waits for stay for a while: otherwise the owner
        would have to compile them, and all rows would wait."""
        size = sum(len(grammar.source) for grammar in self._cache)
        for grammar, cached in list(self._cache.items())[:-1]:
            factor = WAITING_FACTOR if cached.needed_until > time.monotonic() else 1
            if len(self._cache) <= factor * MAX_CACHED and size <= factor * MAX_CACHED_BYTES:
                return
            self._cache.pop(grammar, None)
            size -= len(grammar.source)

    def _loaded_vocabulary(self) -> _Vocabulary:
        if self._load_error is not None:
            raise ModelError(self._load_error)
        if self._vocabulary is None:
            try:
                tokenizer = self._load()
                self._detokenizer = partial(tokenizer.detokenizer, continues=True)
                tokens = vocabulary(tokenizer)
                self._detokenizer = _Detokenizers(tokens, tokenizer)
                self._vocabulary = _Vocabulary(tokens, tokenizer.added_tokens)
            except ModelError as error:
                self._load_error = error.message
                raise
        return self._vocabulary


def compiler_of(source: ModelSource) -> GrammarCompiler:
    """Returns the compiler of a local model. It loads the tokenizer at first use."""
    return GrammarCompiler(lambda: load_tokenizer(source))
