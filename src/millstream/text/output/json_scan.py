"""Incremental JSON scanner: tells where a streamed JSON object ends, and whether it is valid.

Tool calls are streamed before they are complete, so their arguments are checked character by character.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("+-.0123456789eE")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_SPACE = frozenset(" \t\r\n")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Scans one object. It stops at the object's end (`done`) or at the first invalid character (`invalid`).

    The output is strict JSON: a raw line break inside a string, which models often write, is escaped.
    """

    __slots__ = ("_expect", "_stack", "_token", "done", "invalid")

    def __init__(self) -> None:
        self.done = False
        self.invalid = False
        self._stack: list[str] = []
        self._expect = "start"
        self._token = ""

    def feed(self, text: str) -> tuple[str, int]:
        """Returns the JSON of the characters that were consumed, and how many of `text` were."""
        out: list[str] = []
        position = 0
        while position < len(text) and not self.done and not self.invalid:
            char = text[position]
            output = self._string(char) if self._expect in ("string", "key string") else self._step(char)
            if output is None:
                continue  # the character ended a number: scan it again
            if not self.invalid:
                out.append(output)
                position += 1
        return "".join(out), position

    def _step(self, char: str) -> str | None:
        match self._expect:
            case "number":
                return self._number(char)
            case "literal":
                return self._literal(char)
            case "escape" | "key escape":
                return self._escape(char)
            case "hex" | "key hex":
                return self._hex(char)
        if char not in _SPACE:
            self._structure(char)
        elif self._expect == "start":
            self.invalid = True
        return char

    def _structure(self, char: str) -> None:
        expect = self._expect
        if char == "{" and expect in ("start", "value", "first item"):
            self._stack.append("}")
            self._expect = "first key"
        elif expect == "start":
            self.invalid = True
        elif char == '"' and expect in ("first key", "key"):
            self._expect = "key string"
        elif char == ":" and expect == "colon":
            self._expect = "value"
        elif char == "," and expect == "after":
            self._expect = "key" if self._stack[-1] == "}" else "value"
        elif char == self._stack[-1] and expect in ("after", "first key" if char == "}" else "first item"):
            self._stack.pop()
            self._expect = "after"
            self.done = not self._stack
        elif expect in ("value", "first item"):
            self._start_value(char)
        else:
            self.invalid = True

    def _start_value(self, char: str) -> None:
        if char == "[":
            self._stack.append("]")
            self._expect = "first item"
        elif char == '"':
            self._expect = "string"
        elif char in _LITERALS:
            self._expect, self._token = "literal", _LITERALS[char][1:]
        elif char == "-" or (char.isdecimal() and char.isascii()):
            self._expect, self._token = "number", char
        else:
            self.invalid = True

    def _string(self, char: str) -> str:
        key = self._expect == "key string"
        if char == '"':
            self._expect = "colon" if key else "after"
        elif char == "\\":
            self._expect = "key escape" if key else "escape"
        elif char < " ":
            return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char, f"\\u{ord(char):04x}")
        return char

    def _escape(self, char: str) -> str:
        key = "key " if self._expect.startswith("key") else ""
        if char == "u":
            self._expect, self._token = f"{key}hex", ""
        elif char in _ESCAPES:
            self._expect = f"{key}string"
        else:
            self.invalid = True
        return char

    def _hex(self, char: str) -> str:
        self._token += char
        if char not in _HEX:
            self.invalid = True
        elif len(self._token) == 4:
            self._expect = "key string" if self._expect.startswith("key") else "string"
        return char

    def _literal(self, char: str) -> str:
        if not self._token.startswith(char):
            self.invalid = True
        self._token = self._token[1:]
        if not self._token:
            self._expect = "after"
        return char

    def _number(self, char: str) -> str | None:
        if char in _NUMBER_CHARS:
            self._token += char
            return char
        if not _NUMBER.fullmatch(self._token):
            self.invalid = True
            return char
        self._expect = "after"
        return None
