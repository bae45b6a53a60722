"""Finds regular expressions of a tokenizer that could run for ever: a backtracking engine runs them, on any text that a
client sends, and nothing can stop it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from millstream.errors import ModelError

_PIECES = re.compile(
    r"""(?P<escape>\\(?:[pP]\{[^}]*\}|x\{[^}]*\}|.))|(?P<open>\()|(?P<close>\))|(?P<either>\|)
    |(?P<repeat>[*+]|\{\d*,\d*\}|\{\d+\})|(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_CALLS = re.compile(r"\\g<|\\k<|\\[1-9]|\(\?R\)|\(\?&")
"""Groups that are called again, and what they have matched: no tokenizer needs them."""


def check_expressions(backend: tokenizers.Tokenizer) -> None:
    """Raises `ModelError` for a tokenizer with an expression that repeats a group of repetitions or of choices."""
    for part in (backend.normalizer, backend.pre_tokenizer):
        if part is None:
            continue
        for expression in _expressions(json.loads(part.__getstate__())):
            if runs_wild(expression):
                raise ModelError(
                    f"the tokenizer cuts text by the expression {expression[:200]!r}, which repeats a group of "
                    "repetitions or choices: on some texts it would never end"
                )


def runs_wild(expression: str) -> bool:
    if _CALLS.search(expression):
        return True
    groups = [False]
    """For each open group, whether there is a repetition or a choice in it."""
    closed = False
    """Whether the last piece closed a group of that kind."""
    for piece in _PIECES.finditer(_without_classes(expression)):
        kind = piece.lastgroup
        if kind == "repeat" and closed:
            return True
        wild = groups.pop() if kind == "close" and len(groups) > 1 else False
        closed = kind == "close" and wild
        if kind == "open":
            groups.append(False)
        elif kind in ("repeat", "either") or wild:
            groups[-1] = True
    return False


def _without_classes(expression: str) -> str:
    """With a letter for each set of characters: what stands in brackets means itself."""
    out: list[str] = []
    depth = place = 0
    while place < len(expression):
        letter = expression[place]
        if letter == "\\":
            out += [] if depth else [expression[place : place + 2]]
            place += 2
            continue
        if letter == "[":
            out += [] if depth else ["x"]
            depth += 1
        elif letter == "]" and depth:
            depth -= 1
        elif not depth:
            out.append(letter)
        place += 1
    return "".join(out)


def _expressions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "Regex" and isinstance(each, str):
                yield each
            else:
                yield from _expressions(each)
    elif isinstance(value, list):
        for each in value:
            yield from _expressions(each)
