"""Converts grammars to llguidance's form, and its error messages to messages for clients.

The grammar child imports this, so it has few imports.
"""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits

from millstream.exact_json import loads_values
from millstream.text.grammars.lark import json_schemas
from millstream.types import Grammar

COMPACT = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
"""White space in JSON: at most one space after `:` and `,`. If any amount were allowed, a small model could write white
space until its token limit. A schema's own `x-guidance` overrides this."""

MAX_ITEMS = 5_000
"""Parser items at one position: an object with 1,000 optional properties has 4,000."""

LIMITS = LLParserLimits(max_items_in_row=MAX_ITEMS, max_lexer_states=100_000, verbose_errors=False)
"""Limits for checks and for rows. llguidance's own limits per step (lexer fuel, items) stay: about 20 ms."""

_UNSUPPORTED_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_TITLES = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}


def llguidance_source(grammar: Grammar) -> str:
    """Returns the grammar in llguidance's form. Raises `ValueError` if a schema is not JSON or nested too deeply."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.source, defaults=COMPACT)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case _:
            return LLMatcher.grammar_from_lark(grammar.source)


def schemas_of(grammar: Grammar) -> list[object]:
    """Returns the schemas in a grammar, as far as they are JSON."""
    if grammar.kind == "lark":
        return json_schemas(grammar.source)
    try:
        return [loads_values(grammar.source.encode())] if grammar.kind == "json_schema" else []
    except ValueError:
        return []


def title_of(grammar: Grammar) -> str:
    """Returns what error messages call the grammar."""
    return _TITLES.get(grammar.kind, "the grammar")


def explain_error(grammar: Grammar, message: str) -> str:
    """Returns llguidance's error message about a grammar in words for the client who sent it."""
    title = title_of(grammar)
    if found := _UNSUPPORTED_KEYS.search(message):
        return f"{title} uses {found[1]}, which this server cannot enforce. Leave it out, or express it in another way."
    if message.startswith("Unknown format:"):
        name = message.removeprefix("Unknown format:").strip()
        return f'{title} uses "format" with {name}, which this server cannot enforce. Leave it out, or use "pattern".'
    if message.startswith("oneOf"):
        return f'{title} uses "oneOf" with options that may both match. Use "anyOf" if both may match.'
    if grammar.kind == "json_schema" and message.startswith("regex parse error"):
        return f'{title} has a "pattern" that is not supported: {message}'
    if message.startswith("NoExtension"):
        return (
            f"no output can match {title}: it refers only to itself (as {{'$ref': '#'}} does), or its parts exclude "
            "each other."
        )
    if message.startswith(("Parser Error: Current row", "parser error: Too many items")):
        return (
            f"{title} is too complex: more than {MAX_ITEMS} alternatives are possible at one position. Make it smaller."
        )
    return f"{title} cannot be compiled: {_shortened(message)}"


def first_line(message: str) -> str:
    """Returns the first line of an error message: llguidance appends lines of internal state."""
    return message.strip().split("\n", 1)[0]


def _shortened(message: str, max_length: int = 600) -> str:
    """Cuts out the middle of a long message: llguidance quotes the grammar in it."""
    if len(message) <= max_length:
        return message
    return f"{message[: max_length // 2]} … {message[-max_length // 2 :]}"
