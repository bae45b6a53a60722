"""Checks that a grammar can be served: compiles it for a vocabulary of bytes, and tries it.

That takes about as long as with a model's vocabulary. It may take minutes, and a deeply nested grammar overflows the
stack and kills the process. So only a child process does this (`grammar_child`), never the server or an engine.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator, Sequence
from decimal import Decimal

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from millstream.errors import BadRequest
from millstream.exact_json import Written
from millstream.text.grammars.lark import with_any_token
from millstream.text.grammars.source import LIMITS, explain_error, llguidance_source, schemas_of, title_of
from millstream.types import Grammar

WALK_BYTES = 64
WALK_SECONDS = 0.25
"""CPU time for the masks of `WALK_BYTES` bytes. Slower grammars would delay all rows of an engine."""

MAX_EXACT = 2**53
"""The integers that a float can tell apart."""
MAX_INT = 2**63 - 1
"""The largest integer of an answer whose schema has a maximum. A higher maximum is enforced as this one."""
_LIMITS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Their keys are names, not keywords."""

_EOS = 261
"""The EOS token of llguidance's byte vocabulary."""


def check_grammar(grammar: Grammar) -> Grammar:
    """Returns the grammar in a form that engines accept. Raises `BadRequest` that says why it cannot be served."""
    if grammar.kind == "gbnf":
        grammar = Grammar("lark", _from_gbnf(grammar.source))
    for schema in schemas_of(grammar):
        _check_numbers(schema, title_of(grammar))
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


def _check_numbers(schema: object, title: str) -> None:
    """Raises `BadRequest` if a number of a schema is none that llguidance can enforce: it computes with floats and
    integers of 64 bits, so the answer would have another number."""
    if isinstance(schema, list):
        for each in schema:
            _check_numbers(each, title)
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            _check_numbers([*value.values()], title)
        elif name in ("const", "enum"):
            _refuse_first(name, [each for each in _numbers(value) if not _is_float(each)], title)
        elif name in _LIMITS:
            is_integer = schema.get("type") == "integer"
            _refuse_first(name, [each for each in _numbers(value) if not _is_limit(name, each, is_integer)], title)
        else:
            _check_numbers(value, title)


def _refuse_first(name: str, wrong: Sequence[float], title: str) -> None:
    if wrong:
        raise BadRequest(
            f"{title} has {str(wrong[0])[:60]} as {name!r}, which this server cannot enforce exactly: integers there "
            f"have to lie between -{MAX_EXACT} and {MAX_EXACT}, and others be floats of 64 bits. Leave it out, or ask "
            "for a string."
        )


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield value


def _is_float(number: float) -> bool:
    """True if the shortest decimals of a float of 64 bits are this very number."""
    if isinstance(number, float):
        return not isinstance(number, Written)
    return abs(number) <= MAX_EXACT or (abs(number) < 10**300 and Decimal(repr(float(number))) == number)


def _is_limit(name: str, number: float, is_integer: bool) -> bool:
    """True if no answer can exceed a limit: as a float, as an integer of 64 bits and, if exclusive, with one added."""
    if name == "maximum" and is_integer and number >= MAX_INT:
        return True
    if abs(number) < MAX_EXACT or name.startswith("exclusive") or not _is_float(number):
        return abs(number) < MAX_EXACT and _is_float(number)
    return abs(number) < MAX_INT and Decimal(repr(float(number))) == int(float(number))


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
