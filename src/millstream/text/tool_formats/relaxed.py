"""A reader of what models write when they mean JSON: bare keys, single quotes, Python's words, own string marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from millstream.text.tool_formats.format import NotACall
from millstream.text.tool_formats.values import finite

_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"[^\s\"':,{}\[\]<][^\"':,{}\[\]]*")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?=\s*(?:[,}\]]|$))")
_WORD = re.compile(r"[^,{}\[\]]+")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_DEEPEST = 64
_LONGEST_INT = 4000
"""Digits; Python itself refuses to read more than 4300."""


class RelaxedReader:
    """Reads one value of `text` from `place` on. `marks` are further signs that stand around texts."""

    def __init__(self, text: str, place: int = 0, marks: Sequence[str] = ()) -> None:
        self._text = text
        self._marks = tuple(marks)
        self.place = place
        self._depth = 0

    def object(self) -> dict[str, Any]:
        """Raises `NotACall` if there is none."""
        self._take("{")
        self._deeper()
        found: dict[str, Any] = {}
        while not self._at("}"):
            key = self._quoted()
            if key is None:
                key = self._matched(_KEY).strip()
            self._take(":")
            found[key] = self.value()
            if not self._at(","):
                self._take("}")
                break
        self._depth -= 1
        return found

    def value(self) -> Any:
        self._skip()
        letter = self._text[self.place : self.place + 1]
        if letter == "{":
            return self.object()
        if letter == "[":
            return self._list()
        text = self._quoted()
        return self._word() if text is None else text

    def end(self) -> None:
        """Nothing may follow but blanks."""
        self._skip()
        if self.place != len(self._text):
            raise NotACall(f"unexpected text: {self._text[self.place : self.place + 20]!r}")

    def _list(self) -> list[Any]:
        self._take("[")
        self._deeper()
        found = []
        while not self._at("]"):
            found.append(self.value())
            if not self._at(","):
                self._take("]")
                break
        self._depth -= 1
        return found

    def _word(self) -> Any:
        if number := _NUMBER.match(self._text, self.place):
            self.place = number.end()
            word = number[0]
            return int(word) if word.lstrip("-").isdigit() and len(word) <= _LONGEST_INT else finite(word)
        word = self._matched(_WORD).strip()
        return _WORDS.get(word.lower(), word)

    def _quoted(self) -> str | None:
        self._skip()
        for mark in self._marks:
            if self._text.startswith(mark, self.place):
                end = self._text.find(mark, self.place + len(mark))
                if end < 0:
                    raise NotACall("a text without an end")
                found = self._text[self.place + len(mark) : end]
                self.place = end + len(mark)
                return found
        letter = self._text[self.place : self.place + 1]
        return self._escaped(letter) if letter in ('"', "'") and letter else None

    def _escaped(self, quote: str) -> str:
        found: list[str] = []
        place = self.place + 1
        while place < len(self._text):
            letter = self._text[place]
            if letter == quote and (quote == '"' or self._closes(place)):
                self.place = place + 1
                return "".join(found)
            if letter == "\\" and place + 1 < len(self._text):
                place += 1
                letter = self._escape(place)
                if self._text[place] == "u" and len(letter) == 1 and letter != "u":
                    place += 4
            found.append(letter)
            place += 1
        raise NotACall("a text without an end")

    def _escape(self, place: int) -> str:
        letter = self._text[place]
        digits = self._text[place + 1 : place + 5]
        if letter == "u" and re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            return chr(int(digits, 16))
        return _ESCAPES.get(letter, letter)

    def _closes(self, place: int) -> bool:
        """A single quote ends a text only before a sign that may follow one: `'it's here'` is one text."""
        rest = self._text[place + 1 :].lstrip()
        return not rest or rest[0] in ",}]:"

    def _matched(self, pattern: re.Pattern[str]) -> str:
        self._skip()
        found = pattern.match(self._text, self.place)
        if found is None:
            raise NotACall(f"no value at {self._text[self.place : self.place + 20]!r}")
        self.place = found.end()
        return found[0]

    def _at(self, sign: str) -> bool:
        self._skip()
        if not self._text.startswith(sign, self.place):
            return False
        self.place += len(sign)
        return True

    def _take(self, sign: str) -> None:
        if not self._at(sign):
            raise NotACall(f"{sign} is missing")

    def _skip(self) -> None:
        space = _SPACE.match(self._text, self.place)
        self.place = space.end() if space else self.place

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NotACall("too deep")
