"""Lenient JSON reader for what models write: bare keys, single quotes, Python literals, custom string quotes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from millstream.exact_json import number
from millstream.text.tool_formats.format import NotACall

_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"[^\s\"':,{}\[\]<][^\"':,{}\[\]]*")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?=\s*(?:[,}\]]|$))")
_WORD = re.compile(r"[^,{}\[\]]+")
_LITERALS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_MAX_DEPTH = 64


class LenientJsonReader:
    """Reads one value of `text`, starting at `position`. `quotes` are more strings that quote strings."""

    def __init__(self, text: str, position: int = 0, quotes: Sequence[str] = ()) -> None:
        self._text = text
        self._quotes = tuple(quotes)
        self.position = position
        self._depth = 0

    def object(self) -> dict[str, Any]:
        """Reads an object. Raises `NotACall` if there is none."""
        self._expect("{")
        self._descend()
        found: dict[str, Any] = {}
        while not self._accept("}"):
            key = self._quoted()
            if key is None:
                key = self._match(_KEY).strip()
            self._expect(":")
            found[key] = self.value()
            if not self._accept(","):
                self._expect("}")
                break
        self._depth -= 1
        return found

    def value(self) -> Any:
        self._skip_space()
        char = self._text[self.position : self.position + 1]
        if char == "{":
            return self.object()
        if char == "[":
            return self._list()
        text = self._quoted()
        return self._word() if text is None else text

    def end(self) -> None:
        """Raises `NotACall` if anything but white space follows."""
        self._skip_space()
        if self.position != len(self._text):
            raise NotACall(f"unexpected text: {self._text[self.position : self.position + 20]!r}")

    def _list(self) -> list[Any]:
        self._expect("[")
        self._descend()
        found = []
        while not self._accept("]"):
            found.append(self.value())
            if not self._accept(","):
                self._expect("]")
                break
        self._depth -= 1
        return found

    def _word(self) -> Any:
        if found := _NUMBER.match(self._text, self.position):
            self.position = found.end()
            return number(found[0])
        word = self._match(_WORD).strip()
        return _LITERALS.get(word.lower(), word)

    def _quoted(self) -> str | None:
        self._skip_space()
        for quote in self._quotes:
            if self._text.startswith(quote, self.position):
                end = self._text.find(quote, self.position + len(quote))
                if end < 0:
                    raise NotACall("unterminated string")
                found = self._text[self.position + len(quote) : end]
                self.position = end + len(quote)
                return found
        char = self._text[self.position : self.position + 1]
        return self._string(char) if char in ('"', "'") and char else None

    def _string(self, quote: str) -> str:
        found: list[str] = []
        position = self.position + 1
        while position < len(self._text):
            char = self._text[position]
            if char == quote and (quote == '"' or self._closes(position)):
                self.position = position + 1
                return "".join(found)
            if char == "\\" and position + 1 < len(self._text):
                position += 1
                char = self._escape(position)
                if self._text[position] == "u" and len(char) == 1 and char != "u":
                    position += 4
            found.append(char)
            position += 1
        raise NotACall("unterminated string")

    def _escape(self, position: int) -> str:
        char = self._text[position]
        digits = self._text[position + 1 : position + 5]
        if char == "u" and re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            return chr(int(digits, 16))
        return _ESCAPES.get(char, char)

    def _closes(self, position: int) -> bool:
        """True if the single quote at `position` ends its string: only before `,`, `}`, `]` or `:`.

        So `'it's here'` is one string.
        """
        rest = self._text[position + 1 :].lstrip()
        return not rest or rest[0] in ",}]:"

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._skip_space()
        found = pattern.match(self._text, self.position)
        if found is None:
            raise NotACall(f"expected a value at {self._text[self.position : self.position + 20]!r}")
        self.position = found.end()
        return found[0]

    def _accept(self, token: str) -> bool:
        self._skip_space()
        if not self._text.startswith(token, self.position):
            return False
        self.position += len(token)
        return True

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            raise NotACall(f"expected {token}")

    def _skip_space(self) -> None:
        space = _SPACE.match(self._text, self.position)
        self.position = space.end() if space else self.position

    def _descend(self) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotACall(f"more than {_MAX_DEPTH} levels of nesting")
