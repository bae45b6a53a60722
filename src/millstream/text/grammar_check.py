"""Whether a grammar can be served: it is compiled and tried with a vocabulary of bytes.

Compiling takes about as long as with a model's vocabulary. It may take minutes, and a deeply nested grammar exhausts
the stack and ends the process. So a child does this (`grammar_child`), never the server or an engine.
"""

from __future__ import annotations

import functools
import random
import re
import time

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from millstream.errors import BadRequest
from millstream.text.grammar_source import LIMITS, in_words, source_of, title_of
from millstream.types import Grammar

TRIED_BYTES = 64
WALK_SECONDS = 0.25
"""Of CPU time, for the masks of so many bytes: slow ones would hold up all rows of an engine."""

_END = 261
"""The token that ends an answer in llguidance's vocabulary of bytes."""

_SPECIAL = re.compile(
    r"""//[^\n]* | "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\\n])+/ | (?P<token> <\[[^\]\n]*\]> | <[^<>\s"]+> )""", re.VERBOSE
)
"""Tokens that a Lark grammar names, outside of comments, strings and expressions."""


def checked(grammar: Grammar) -> Grammar:
    """The grammar as an engine takes it. Raises `BadRequest` that says what of it cannot be served."""
    if grammar.kind == "gbnf":
        grammar = Grammar("lark", _from_gbnf(grammar.source))
    try:
        source = source_of(_with_known_tokens(grammar))
    except ValueError as error:
        raise BadRequest(f"{title_of(grammar)} cannot be served: {error}") from error
    matcher = LLMatcher(_bytes(), source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        _walk(matcher, title_of(grammar))
    if matcher.is_error():
        raise BadRequest(in_words(grammar, matcher.get_error().replace("<non-verbose/>", "").strip()))
    return grammar


def _walk(matcher: LLMatcher, title: str) -> None:
    """Take any bytes that the grammar allows, for a while."""
    rng = random.Random(0)
    until = time.process_time() + WALK_SECONDS
    for _ in range(TRIED_BYTES):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        options = [token for token in range(_END) if mask >> token & 1]
        if not options or not matcher.consume_token(rng.choice(options)):
            return
        if time.process_time() > until:
            raise BadRequest(
                f"{title} is too slow to follow: its strings or terminals are too long. Make them shorter."
            )


@functools.cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte", eos_token=_END)


def _with_known_tokens(grammar: Grammar) -> Grammar:
    """Tokens of a model's vocabulary are replaced by one of the bytes' vocabulary, which has few."""
    if grammar.kind != "lark" or "<" not in grammar.source:
        return grammar
    return Grammar("lark", _SPECIAL.sub(lambda found: "<[256]>" if found["token"] else found[0], grammar.source))


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
