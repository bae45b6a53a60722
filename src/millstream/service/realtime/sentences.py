"""Cuts text into sentences as it is written, so that the first is spoken while the second is generated."""

from __future__ import annotations

import re

LEAST = 12
"""Characters. Shorter sentences are spoken with the next one: each costs a pass of the model and a pause."""
FIRST_LEAST = 2
"""The same for the first sentence, which somebody waits for."""
MOST = 300
"""Characters without an end of a sentence, after which a comma or a space will do."""

_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s)|[。！？]+[」』”）]*|\n+")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No|[A-Z])\.$")
_NUMBERED = re.compile(r"^\s*\d+\.$")
_SOFT_END = re.compile(r"[,;:，；：]\s+|\s+")


class SentenceSplitter:
    """`feed` returns the sentences that are complete. Joined with `flush`, they are the text."""

    def __init__(self) -> None:
        self._text = ""
        self._least = FIRST_LEAST

    def feed(self, text: str) -> list[str]:
        self._text += text
        found = []
        while (end := self._end()) is not None:
            found.append(self._text[:end])
            self._text = self._text[end:]
            self._least = LEAST
        return found

    def flush(self) -> str:
        """The rest, which has no end."""
        text, self._text = self._text, ""
        return text

    def _end(self) -> int | None:
        for match in _END.finditer(self._text):
            sentence = self._text[: match.end()]
            if len(sentence.strip()) < self._least or not any(char.isalnum() for char in sentence):
                continue
            if not _ABBREVIATION.search(sentence) and not _NUMBERED.match(sentence):
                return match.end()
        if len(self._text) <= MOST:
            return None
        soft = [match.end() for match in _SOFT_END.finditer(self._text, MOST // 2, MOST)]
        return soft[-1] if soft else MOST
