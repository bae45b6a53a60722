"""Checks that a grammar can be served: compiles it for a vocabulary of bytes, and tries it.

That takes about as long as with a model's vocabulary. It may take minutes, and a deeply nested grammar overflows the
stack and kills the process. So only a child process does this (`grammar_child`), never the server or an engine.
"""

from __future__ import annotations

import functools
import random
import time

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from millstream.errors import BadRequest
from millstream.text.grammars.lark import with_any_token
from millstream.text.grammars.source import LIMITS, explain_error, llguidance_source, title_of
from millstream.types import Grammar

WALK_BYTES = 64
WALK_SECONDS = 0.25
"""CPU time for the masks of `WALK_BYTES` bytes. Slower grammars would delay all rows of an engine."""

_EOS = 261
"""The EOS token of llguidance's byte vocabulary."""


def check_grammar(grammar: Grammar) -> Grammar:
    """Returns the grammar in a form that engines accept. Raises `BadRequest` that says why it cannot be served."""
    if grammar.kind == "gbnf":
        grammar = Grammar("lark", _from_gbnf(grammar.source))
    try:
        source = llguidance_source(with_any_token(grammar))
    except ValueError as error:
        raise BadRequest(f"{title_of(grammar)} cannot be compiled: {error}") from error
    matcher = LLMatcher(_byte_tokenizer(), source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        _check_speed(matcher, title_of(grammar))
    if matcher.is_error():
        raise BadRequest(explain_error(grammar, matcher.get_error().replace("<non-verbose/>", "").strip()))
    return grammar


def _check_speed(matcher: LLMatcher, title: str) -> None:
    """Follows the grammar with random bytes. Raises `BadRequest` if that is too slow."""
    rng = random.Random(0)
    until = time.process_time() + WALK_SECONDS
    for _ in range(WALK_BYTES):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        options = [token for token in range(_EOS) if mask >> token & 1]
        if not options or not matcher.consume_token(rng.choice(options)):
            return
        if time.process_time() > until:
            raise BadRequest(
                f"{title} is too slow to enforce: its strings or terminals are too long. Make them shorter."
            )


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte", eos_token=_EOS)


class _GbnfErrors:
    """Context manager that converts errors of the GBNF converter to `BadRequest`.

    The converter raises its own error, or `Exception` itself, so only the exact class is caught.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception or kind is GbnfToLarkError or kind is RecursionError:
            raise BadRequest(f"the GBNF grammar cannot be parsed: {error}") from error


def _from_gbnf(source: str) -> str:
    with _GbnfErrors():
        return gbnf_to_lark(source)
