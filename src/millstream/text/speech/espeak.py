"""Kokoro's phonemes from the IPA that eSpeak NG writes, for other languages than English."""

from __future__ import annotations

import re
from collections.abc import Callable

RunEspeak = Callable[[str, str], str]
"""The IPA of a text in a language, with `^` between letters that are one sound. Blocks."""

_SYMBOLS = (("d^ʒ", "ʤ"), ("t^ʃ", "ʧ"), ("t^s", "ʦ"), ("d^z", "ʣ"), ("d^ʑ", "ʥ"), ("t^ɕ", "ʨ"), ("^", ""), ("g", "ɡ"))
"""What Kokoro writes as one symbol."""
_TIES = re.compile("[\u0361\u035c]")
_LANGUAGE = re.compile(r"\([a-z-]+\)")
"""eSpeak notes where a word of another language begins and ends."""


def espeak_phonemes(run: RunEspeak, text: str, language: str) -> str:
    """The phonemes of a sentence. Punctuation is kept: Kokoro makes pauses of it."""
    parts = re.split(r"([.,!?;:—…。、！？]+\s*)", text)
    spoken = [
        _symbols(run(part, language)) if place % 2 == 0 and part.strip() else part for place, part in enumerate(parts)
    ]
    return re.sub(r"\s+", " ", "".join(spoken)).strip()


def _symbols(ipa: str) -> str:
    ipa = _LANGUAGE.sub("", _TIES.sub("^", ipa))
    for theirs, ours in _SYMBOLS:
        ipa = ipa.replace(theirs, ours)
    return " ".join(ipa.replace("_", "").replace("-", "").split())
