"""English text to Kokoro's phonemes."""

from __future__ import annotations

import re
import unicodedata

from millstream.text.speech.alphabet import american, british
from millstream.text.speech.heteronyms import choose, weak
from millstream.text.speech.letters import NAMES, spell
from millstream.text.speech.lexicon import dictionary
from millstream.text.speech.normalize import normalize
from millstream.text.speech.word_list import listed
from millstream.text.speech.words import begins_with_vowel, pronounce, spoken_as_word

_TOKEN = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*'?|[^\w\s]")
_PUNCTUATION = {
    ".": ".", ",": ",", "!": "!", "?": "?", ";": ";", ":": ":", "—": "—", "(": "(", ")": ")",
    "[": "(", "]": ")", "{": "(", "}": ")",
}  # fmt: skip
_SPELLED = listed("us it ai id tv pc uk eu un ip os ui ux hr pr qa cd dvd usb pdf sql ram cpu gpu api url ceo ufo")
"""Read letter by letter if they are in capitals, although some are words."""
_PLAIN_LETTERS = str.maketrans(
    {"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"}
)
_PRONOUNS = listed("it me him her us them you")
"""Weak at the end of a sentence too."""
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


class EnglishPhonemes:
    def __init__(self, *, british_accent: bool = False) -> None:
        self._british = british_accent

    def __call__(self, text: str) -> str:
        """The phonemes of a sentence, with its punctuation. Signs that have no sound are left out."""
        tokens = _TOKEN.findall(normalize(text))
        words = [word for token in tokens for word in (_CAMEL.split(token) if token[0].isalpha() else [token])]
        lower = [word.lower() for word in words]
        sentence = frozenset(lower)
        spoken: list[str] = []
        for place, word in enumerate(words):
            if not word[0].isalpha():
                _punctuate(spoken, word)
                continue
            before = lower[place - 1] if place else ""
            after = next((each for each in lower[place + 1 : place + 3] if each[0].isalpha()), "")
            said = self._word(word, before, after, sentence, is_last=not after)
            if said:
                spoken.append(said)
        return _joined(spoken)

    def _word(self, word: str, before: str, after: str, sentence: frozenset[str], *, is_last: bool) -> str:
        lower = unicodedata.normalize("NFD", word.lower().rstrip("'")).translate(_PLAIN_LETTERS)
        lower = re.sub(r"[^a-z']", "", lower)  # accents are marks of their own now
        if not lower:
            return ""
        if _is_initials(word, lower):
            return "".join(self._said(code, "") for code in spell(lower))
        if len(lower) == 1 and lower not in "ai" and lower in NAMES:
            return self._said(NAMES[lower], "")
        if lower == "a" and word == "A" and (is_last or after in ("m", "i")):
            return self._said(NAMES["a"], "")
        if not is_last or lower in _PRONOUNS:
            small = weak(lower, begins_with_vowel(pronounce(after)) if after else False, british=self._british)
            if small is not None and len(sentence) > 1:
                return small
        return self._said(choose(lower, before, after, sentence) or pronounce(lower), lower)

    def _said(self, code: str, spelling: str) -> str:
        return british(code, spelling) if self._british else american(code)


def _is_initials(word: str, lower: str) -> bool:
    """True for capitals that are read letter by letter."""
    capitals = word.removesuffix("s").removesuffix("'")
    if len(capitals) < 2 or not (capitals.isascii() and capitals.isupper()):
        return False
    if lower in _SPELLED:
        return True
    return len(capitals) <= 5 and lower not in dictionary() and not (len(lower) > 3 and spoken_as_word(lower))


def _punctuate(spoken: list[str], sign: str) -> None:
    """Several signs in a row are the strongest of them."""
    mark = _PUNCTUATION.get(sign, "")
    if not mark:
        return
    if spoken and spoken[-1] in ".,!?;:—" and mark in ".,!?;:—":
        if spoken[-1] in ",;:—" or (spoken[-1] == "." and mark in "!?"):
            spoken[-1] = mark
        return
    spoken.append(mark)


def _joined(spoken: list[str]) -> str:
    text = ""
    for part in spoken:
        if part in (".", ",", "!", "?", ";", ":", ")"):
            text += part
        else:
            text += part if not text or text.endswith("(") else f" {part}"
    return text.lstrip(".,!?;: ")
