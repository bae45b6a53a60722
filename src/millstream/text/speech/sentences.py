"""Cuts a text into pieces that are spoken at once: sentences, joined if they are short and cut if they are long."""

from __future__ import annotations

import re

from millstream.text.speech.word_list import listed

FIRST_CHARACTERS, CHARACTERS, MAX_CHARACTERS = 80, 160, 320
"""The first piece is short, so that sound begins early; later ones are joined up to the second limit. What is longer
than the third is cut at a comma or the like, or at a blank."""

_ABBREVIATIONS = listed(
    "mr mrs ms dr prof sr jr st vs etc inc ltd co corp dept est fig approx no vol gen col capt lt sgt rev "
    "hon e.g i.e a.m "
    "p.m u.s u.k jan feb mar apr jun jul aug sep sept oct nov dec mt ft ave blvd rd"
)
_END = re.compile(r"(?:[.!?…]+|[。！？]+)[\"'”’)\]]*(?=\s|$)|[。！？]+|\n\s*\n|\n(?=\s*(?:[-*•]|\d+[.)]))")
_CLAUSE = re.compile(r"[;:—]\s+|,\s+|\s+[-–—]\s+")
_WORD_BEFORE = re.compile(r"([\w.]+)$")


def pieces(text: str) -> list[str]:
    """Never empty ones. Together they have all that is spoken, in order."""
    cut = [part for sentence in sentences(text) for part in _cut(sentence, MAX_CHARACTERS)]
    if cut and len(cut[0]) > FIRST_CHARACTERS:
        cut[:1] = _first(cut[0])
    joined: list[str] = []
    for part in cut:
        if len(joined) > 1 and len(joined[-1]) + len(part) < CHARACTERS:
            joined[-1] = f"{joined[-1]} {part}"
        else:
            joined.append(part)
    return joined


def sentences(text: str) -> list[str]:
    found, start = [], 0
    for match in _END.finditer(text):
        if _is_end(text, start, match):
            found.append(text[start : match.end()])
            start = match.end()
    found.append(text[start:])
    return [" ".join(sentence.split()) for sentence in found if sentence.strip()]


def _is_end(text: str, start: int, match: re.Match[str]) -> bool:
    if not match[0].startswith(".") or match[0].startswith(".."):
        return True
    before = _WORD_BEFORE.search(text[max(start, match.start() - 20) : match.start()])
    if before is None:
        return True
    word = before[1].lower()
    following = text[match.end() :].lstrip()
    if word in _ABBREVIATIONS:
        # An abbreviation ends a sentence only if it is one that stands at ends, and a capital letter follows.
        return word in ("etc", "a.m", "p.m", "inc", "ltd", "jr", "co") and following[:1].isupper()
    is_initial = len(word) == 1 and word.isalpha() and word != "i"
    return not (is_initial and following[:1].isupper())


def _first(sentence: str) -> list[str]:
    """Cut at its first clause, if that leaves two parts that can be spoken well."""
    for match in _CLAUSE.finditer(sentence):
        if 15 <= match.end() <= FIRST_CHARACTERS and len(sentence) - match.end() >= 15:
            return [sentence[: match.end()].strip(), sentence[match.end() :].strip()]
    return [sentence]


def _cut(sentence: str, limit: int) -> list[str]:
    parts = []
    while len(sentence) > limit:
        place = max(
            (match.end() for match in _CLAUSE.finditer(sentence, 0, limit) if match.end() > limit // 3), default=0
        )
        if not place:
            place = sentence.rfind(" ", limit // 3, limit) + 1 or limit
        parts.append(sentence[:place].strip())
        sentence = sentence[place:].strip()
    return [part for part in (*parts, sentence) if part]
