"""Rejects tokenizers whose regular expressions may backtrack catastrophically (ReDoS).

A backtracking engine runs them on any text that a client sends, and it cannot be interrupted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from millstream.errors import ModelError

_TOKENS = re.compile(
    r"""(?P<escape>\\(?:[pP]\{[^}]*\}|x\{[^}]*\}|.))|(?P<open>\()|(?P<close>\))|(?P<either>\|)
    |(?P<repeat>[*+]|\{\d*,\d*\}|\{\d+\})|(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_BACKREFERENCES = re.compile(r"\\g<|\\k<|\\[1-9]|\(\?R\)|\(\?&")
"""Backreferences and calls of groups, which no tokenizer needs."""


def check_regexes(backend: tokenizers.Tokenizer) -> None:
    """Raises `ModelError` if an expression of the tokenizer may backtrack catastrophically."""
    for part in (backend.normalizer, backend.pre_tokenizer):
        if part is None:
            continue
        for expression in _regexes(json.loads(part.__getstate__())):
            if may_backtrack_catastrophically(expression):
                raise ModelError(
                    f"the tokenizer uses the regular expression {expression[:200]!r}, which repeats a group of "
                    "repetitions or alternatives: on some texts it would never end. Such a tokenizer is not supported"
                )


def may_backtrack_catastrophically(expression: str) -> bool:
    """True if the expression repeats a group that contains a repetition or alternatives, or has backreferences."""
    if _BACKREFERENCES.search(expression):
        return True
    groups = [False]
    """For each open group, whether it contains a repetition or alternatives."""
    closed = False
    """True if the last token closed such a group."""
    for token in _TOKENS.finditer(_without_classes(expression)):
        kind = token.lastgroup
        if kind == "repeat" and closed:
            return True
        ambiguous = groups.pop() if kind == "close" and len(groups) > 1 else False
        closed = kind == "close" and ambiguous
        if kind == "open":
            groups.append(False)
        elif kind in ("repeat", "either") or ambiguous:
            groups[-1] = True
    return False


def _without_classes(expression: str) -> str:
    """Replaces each character class by one character: repetition signs in brackets are literal."""
    out: list[str] = []
    depth = position = 0
    while position < len(expression):
        char = expression[position]
        if char == "\\":
            out += [] if depth else [expression[position : position + 2]]
            position += 2
            continue
        if char == "[":
            out += [] if depth else ["x"]
            depth += 1
        elif char == "]" and depth:
            depth -= 1
        elif not depth:
            out.append(char)
        position += 1
    return "".join(out)


def _regexes(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "Regex" and isinstance(each, str):
                yield each
            else:
                yield from _regexes(each)
    elif isinstance(value, list):
        for each in value:
            yield from _regexes(each)
