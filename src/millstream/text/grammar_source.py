"""Grammars as llguidance takes them, and what it says of them, in words for clients. Used by a child: few imports."""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits

from millstream.types import Grammar

COMPACT = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
"""White space between the parts of JSON: one space where people write one. A small model that may write as much as it
likes can go on until its limit. A schema's own `x-guidance` goes before this."""

MAX_ITEMS = 5_000
"""Alternatives that may be open at one place: an object with 1,000 optional properties has 4,000."""

LIMITS = LLParserLimits(max_items_in_row=MAX_ITEMS, max_lexer_states=100_000, verbose_errors=False)
"""Of a check and of a row. llguidance's own limits for a step (lexer fuel, items) stay: about 20 ms."""

_UNSERVED_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_TITLES = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}


def source_of(grammar: Grammar) -> str:
    """Raises `ValueError` for a schema that is no JSON, or nested too deeply."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.source, defaults=COMPACT)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case _:
            return LLMatcher.grammar_from_lark(grammar.source)


def title_of(grammar: Grammar) -> str:
    return _TITLES.get(grammar.kind, "the grammar")


def in_words(grammar: Grammar, message: str) -> str:
    """What llguidance says of a grammar, for the client who sent it."""
    title = title_of(grammar)
    if found := _UNSERVED_KEYS.search(message):
        return f"{title} uses {found[1]}, which this server cannot enforce. Leave it out, or say it in another way."
    if message.startswith("Unknown format:"):
        return f'{title} uses "format" with{message.removeprefix("Unknown format:")}, which this server cannot enforce.'
    if message.startswith("oneOf"):
        return f'{title} uses "oneOf" with options that may both match; use "anyOf" if that is no harm.'
    if grammar.kind == "json_schema" and message.startswith("regex parse error"):
        return f'{title} has a "pattern" that cannot be served: {message}'
    if message.startswith("NoExtension"):
        return (
            f"no answer can match {title}: it refers only to itself (as {{'$ref': '#'}} does), or its parts exclude "
            "each other."
        )
    if message.startswith(("Parser Error: Current row", "parser error: Too many items")):
        return f"{title} is too complex: more than {MAX_ITEMS} alternatives are open at one place. Make it smaller."
    return f"{title} cannot be served: {_shortened(message)}"


def first_line(message: str) -> str:
    """llguidance adds lines of state to what it says."""
    return message.strip().split("\n", 1)[0]


def _shortened(message: str, most: int = 600) -> str:
    """It quotes what it could not read, which may be long."""
    return message if len(message) <= most else f"{message[: most // 2]} … {message[-most // 2 :]}"
