"""Rewrites literals and regular expressions to match text as it appears inside a JSON string.

A model that writes a tool's input as a JSON string escapes quotes, backslashes and control characters. A grammar of the
input must then match the escaped text: `/a\\nb/` becomes an expression of the four characters `a`, `\\`, `n`, `b`.
Each character has one escaped form, the one that `json.dumps(text, ensure_ascii=False)` writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_SHORT = {'"': '"', "\\": "\\", "\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}
_SPECIALS = [*range(0x20), 0x22, 0x5C]
"""Code points that are escaped in JSON."""
_NOT_SPECIAL = r"[\x00-\x1F\x22\x5C]"
_MAX_CODE = 0x10FFFF

_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
}

_FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE, "u": re.UNICODE}
_SET_OPERATIONS = ("&&", "--", "~~", "||")


class CannotRewrite(ValueError):
    """A grammar uses something that has no form inside a JSON string. The message says what."""


def escaped_text(text: str) -> str:
    """Returns text as it appears inside a JSON string."""
    return "".join(_escaped(ord(char)) for char in text)


def escaped_regex(pattern: str, flags: str = "") -> str:
    """Returns an expression, in the syntax of Rust's `regex`, that matches what `pattern` matches, escaped.

    Raises `CannotRewrite` for anchors, look-around, back-references and Unicode classes by name.
    """
    tree = parsed(pattern, flags)
    try:
        return _sequence(tree, tree.state.flags)
    except RecursionError:
        raise CannotRewrite("a regular expression that is nested too deeply") from None


def escaped_range(first: str, last: str) -> str:
    """Returns an expression that matches one character of a range, escaped."""
    return _class([(op.RANGE, (ord(first), ord(last)))], 0)


def parsed(pattern: str, flags: str = "") -> Any:
    """Parses a regular expression. Raises `CannotRewrite` if Python cannot, or would parse it differently."""
    if any(0xD800 <= ord(char) < 0xE000 for char in pattern):
        raise CannotRewrite("an unpaired surrogate")
    if _has_nested_class(pattern):
        raise CannotRewrite("a character class in a character class")
    try:
        return parser.parse(pattern, sum(_FLAGS[flag] for flag in set(flags)))
    except KeyError as error:
        raise CannotRewrite(f"the flag {error} of a regular expression") from None
    except (re.error, OverflowError, RecursionError) as error:
        raise CannotRewrite(f"the regular expression /{pattern[:100]}/ ({error})") from None


def _has_nested_class(pattern: str) -> bool:
    """True if a class contains `[` or a set operation, which Rust's `regex` and Python read differently."""
    start = -1  # of the class around the position
    position = 0
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            position += 1
        elif start < 0 and char == "[":
            position += pattern[position + 1 : position + 2] == "^"
            start = position
        elif start >= 0 and char == "]" and position > start + 1:
            start = -1
        elif start >= 0 and (char == "[" or pattern[position : position + 2] in _SET_OPERATIONS):
            return True
        position += 1
    return False


def can_match(tree: Iterable[tuple[Any, Any]], code: int, flags: int) -> bool:
    """True if an expression can match text that contains the character `code`."""
    for kind, value in tree:
        match kind:
            case op.LITERAL:
                found = value == code
            case op.NOT_LITERAL:
                found = value != code
            case op.ANY:
                found = code != 0x0A or bool(flags & re.DOTALL)
            case op.IN:
                found = code in _members(value, [code])
            case op.BRANCH:
                found = any(can_match(branch, code, flags) for branch in value[1])
            case op.SUBPATTERN:
                found = can_match(value[3], code, (flags | value[1]) & ~value[2])
            case op.MAX_REPEAT | op.MIN_REPEAT:
                found = can_match(value[2], code, flags)
            case _:
                found = True
        if found:
            return True
    return False


def _escaped(code: int) -> str:
    char = chr(code)
    if char in _SHORT:
        return "\\" + _SHORT[char]
    return f"\\u{code:04x}" if code < 0x20 else char


def _quoted(text: str) -> str:
    """Returns an expression that matches exactly `text`."""
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):X}}}" for char in text)


def _sequence(tree: Iterable[tuple[Any, Any]], flags: int) -> str:
    return "".join(_node(kind, value, flags) for kind, value in tree)


def _node(kind: Any, value: Any, flags: int) -> str:
    match kind:
        case op.LITERAL:
            return _class([(op.LITERAL, value)], flags) if flags & re.IGNORECASE else _quoted(_escaped(value))
        case op.NOT_LITERAL:
            return _class([(op.NEGATE, None), (op.LITERAL, value)], flags)
        case op.ANY:
            excluded = [] if flags & re.DOTALL else [(op.LITERAL, 0x0A)]
            return _class([(op.NEGATE, None), *excluded], flags)
        case op.IN:
            return _class(value, flags)
        case op.BRANCH:
            return "(?:" + "|".join(_sequence(branch, flags) for branch in value[1]) + ")"
        case op.SUBPATTERN:
            return "(?:" + _sequence(value[3], (flags | value[1]) & ~value[2]) + ")"
        case op.MAX_REPEAT | op.MIN_REPEAT:
            least, most, body = value
            limits = f"{{{least},}}" if most is op.MAXREPEAT else f"{{{least},{most}}}"
            return f"(?:{_sequence(body, flags)}){limits}"
        case _:
            raise CannotRewrite(f"anchors, look-around or back-references in regular expressions ({kind})")


def _class(items: Sequence[tuple[Any, Any]], flags: int) -> str:
    """Returns an expression for one character of a class: those that are written as they are, and the escaped ones."""
    special = _members(items, _SPECIALS)
    options = [_plain(items, flags)] if _has_plain(items) else []
    options += [_quoted(_escaped(code)) for code in special if chr(code) in _SHORT]
    hexadecimal = [_hex(code) for code in special if chr(code) not in _SHORT]
    if hexadecimal:
        options.append(_quoted("\\u00") + "(?:" + "|".join(hexadecimal) + ")")
    if not options:
        raise CannotRewrite("a character class that matches nothing")
    return options[0] if len(options) == 1 else "(?:" + "|".join(options) + ")"


def _hex(code: int) -> str:
    digits = f"{code:02x}"
    return digits[0] + (f"[{digits[1]}{digits[1].upper()}]" if digits[1].isalpha() else digits[1])


def _members(items: Sequence[tuple[Any, Any]], codes: Sequence[int]) -> list[int]:
    """Returns which of `codes` a class contains."""
    found: set[int] = set()
    for kind, value in items:
        if kind is op.CATEGORY:
            found.update(code for code in codes if _in_category(code, value))
        elif kind is not op.NEGATE:
            first, last = value if kind is op.RANGE else (value, value)
            found.update(code for code in codes if first <= code <= last)
    negated = any(kind is op.NEGATE for kind, _ in items)
    return [code for code in codes if (code in found) != negated]


def _in_category(code: int, category: Any) -> bool:
    # The Rust crate `regex`, which llguidance uses, does not count the separators 1C to 1F as white space.
    if 0x1C <= code < 0x20 and category in (op.CATEGORY_SPACE, op.CATEGORY_NOT_SPACE):
        return bool(category is op.CATEGORY_NOT_SPACE)
    return re.match(_CATEGORIES[category], chr(code)) is not None


def _has_plain(items: Sequence[tuple[Any, Any]]) -> bool:
    """True if a class contains a character that is written as it is."""
    for kind, value in items:
        if kind in (op.NEGATE, op.CATEGORY):
            return True
        first, last = value if kind is op.RANGE else (value, value)
        if last >= 0x20 and not (first == last and last in _SPECIALS):
            return True
    return False


def _plain(items: Sequence[tuple[Any, Any]], flags: int) -> str:
    body = ""
    for kind, value in items:
        if kind is op.CATEGORY:
            body += _CATEGORIES[value]
        elif kind is not op.NEGATE:
            first, last = value if kind is op.RANGE else (value, value)
            body += f"\\x{{{first:X}}}-\\x{{{min(last, _MAX_CODE):X}}}"
    negated = any(kind is op.NEGATE for kind, _ in items)
    every = f"\\x{{0}}-\\x{{{_MAX_CODE:X}}}"
    inner = f"[^{body}]" if negated and body else f"[{body or every}]"
    found = f"[{inner}--{_NOT_SPECIAL}]"
    return f"(?i:{found})" if flags & re.IGNORECASE else found
