"""Follows a JSON object as it comes, letter by letter: where it ends, and whether it is one at all."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_LETTERS = frozenset("+-.0123456789eE")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_SPACE = frozenset(" \t\r\n")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Reads one object. What it gives back is strict JSON: a line break inside a string, which models like to write
    as it is, comes out escaped. After the end, or after the first letter that cannot be JSON, it reads no further.
    """

    __slots__ = ("_expect", "_stack", "_word", "broken", "done")

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._stack: list[str] = []
        self._expect = "start"
        self._word = ""

    def feed(self, text: str) -> tuple[str, int]:
        """The JSON of what was read, and how many letters of `text` that were."""
        out: list[str] = []
        place = 0
        while place < len(text) and not self.done and not self.broken:
            letter = text[place]
            written = self._string(letter) if self._expect in ("string", "key string") else self._step(letter)
            if written is None:
                continue  # the same letter again: it ended a number
            if not self.broken:
                out.append(written)
                place += 1
        return "".join(out), place

    def _step(self, letter: str) -> str | None:
        match self._expect:
            case "number":
                return self._number(letter)
            case "word":
                return self._spell(letter)
            case "escape" | "key escape":
                return self._escape(letter)
            case "hex" | "key hex":
                return self._hex(letter)
        if letter not in _SPACE:
            self._structure(letter)
        elif self._expect == "start":
            self.broken = True
        return letter

    def _structure(self, letter: str) -> None:
        expect = self._expect
        if letter == "{" and expect in ("start", "value", "first item"):
            self._stack.append("}")
            self._expect = "first key"
        elif expect == "start":
            self.broken = True
        elif letter == '"' and expect in ("first key", "key"):
            self._expect = "key string"
        elif letter == ":" and expect == "colon":
            self._expect = "value"
        elif letter == "," and expect == "after":
            self._expect = "key" if self._stack[-1] == "}" else "value"
        elif letter == self._stack[-1] and expect in ("after", "first key" if letter == "}" else "first item"):
            self._stack.pop()
            self._expect = "after"
            self.done = not self._stack
        elif expect in ("value", "first item"):
            self._begin_value(letter)
        else:
            self.broken = True

    def _begin_value(self, letter: str) -> None:
        if letter == "[":
            self._stack.append("]")
            self._expect = "first item"
        elif letter == '"':
            self._expect = "string"
        elif letter in _WORDS:
            self._expect, self._word = "word", _WORDS[letter][1:]
        elif letter == "-" or (letter.isdecimal() and letter.isascii()):
            self._expect, self._word = "number", letter
        else:
            self.broken = True

    def _string(self, letter: str) -> str:
        key = self._expect == "key string"
        if letter == '"':
            self._expect = "colon" if key else "after"
        elif letter == "\\":
            self._expect = "key escape" if key else "escape"
        elif letter < " ":
            return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(letter, f"\\u{ord(letter):04x}")
        return letter

    def _escape(self, letter: str) -> str:
        key = "key " if self._expect.startswith("key") else ""
        if letter == "u":
            self._expect, self._word = f"{key}hex", ""
        elif letter in _ESCAPES:
            self._expect = f"{key}string"
        else:
            self.broken = True
        return letter

    def _hex(self, letter: str) -> str:
        self._word += letter
        if letter not in _HEX:
            self.broken = True
        elif len(self._word) == 4:
            self._expect = "key string" if self._expect.startswith("key") else "string"
        return letter

    def _spell(self, letter: str) -> str:
        if not self._word.startswith(letter):
            self.broken = True
        self._word = self._word[1:]
        if not self._word:
            self._expect = "after"
        return letter

    def _number(self, letter: str) -> str | None:
        if letter in _NUMBER_LETTERS:
            self._word += letter
            return letter
        if not _NUMBER.fullmatch(self._word):
            self.broken = True
            return letter
        self._expect = "after"
        return None
