"""How an English word is said: by the dictionary, by its parts, or by rules."""

from __future__ import annotations

import functools

from millstream.text.speech.arpabet import VOWELS, demoted
from millstream.text.speech.letters import sound_out, spell
from millstream.text.speech.lexicon import dictionary

_VOICELESS = frozenset("ptkfT")
_SIBILANTS = frozenset("szSZCj")
_PREFIXES = {
    "un": "^n", "re": "ri", "pre": "pri", "non": "nAn", "anti": "@2nti", "multi": "m^2lti", "over": "o2vR",
    "under": "^2ndR", "super": "su2pR", "micro": "mY2kro", "mini": "mI2ni", "auto": "O2to", "co": "ko", "de": "di",
    "dis": "dIs", "mis": "mIs", "inter": "I2ntR", "cyber": "sY2bR", "hyper": "hY2pR", "mega": "mE2g^", "out": "W2t",
    "sub": "s^2b", "tele": "tE2l^", "trans": "tr@2nz", "ultra": "^2ltr^", "up": "^p", "bio": "bY2o", "geo": "ji2o",
    "eco": "i2ko", "meta": "mE2t^",
}  # fmt: skip
_SUFFIXES = {
    "ly": "li", "ness": "n^s", "less": "l^s", "ful": "f^l", "ment": "m^nt", "able": "^b^l", "er": "R", "ers": "Rz",
    "ing": "IN", "ings": "INz", "ish": "IS", "ist": "Ist", "ists": "Ists", "ism": "Iz^m", "wise": "wY2z",
    "like": "lY2k",
    "y": "i", "est": "Ist", "ship": "SIp", "hood": "hU2d", "ware": "wE2r", "able's": "^b^lz",
}  # fmt: skip
MAX_LETTERS = 60
"""A longer word is none: it is said as far as this."""


@functools.lru_cache(maxsize=4096)
def pronounce(word: str) -> str:
    """The codes of a word in lower case, of letters and apostrophes."""
    word = word[:MAX_LETTERS]
    return _known(word) or _compound(word) or _guess(word)


def spoken_as_word(word: str) -> bool:
    """True if the dictionary has it, or it could be said: it has vowels among its consonants."""
    return word in dictionary() or (len(word) > 3 and any(letter in "aeiouy" for letter in word[1:]))


def _known(word: str, depth: int = 2) -> str | None:
    """By the dictionary, or by its parts if they are in it."""
    words = dictionary()
    if word in words:
        return words[word]
    bare = word.strip("'")
    if bare in words:
        return words[bare]
    if depth == 0 or len(word) < 3:
        return None
    return _inflected(word, depth) or _prefixed(word, depth) or _suffixed(word, depth)


def _inflected(word: str, depth: int) -> str | None:
    if word.endswith(("'s", "s'")):
        return _with_s(_known(word[:-2], depth - 1) or sound_out(word[:-2]))
    stem = None
    if word.endswith("ies"):
        stem = _known(f"{word[:-3]}y", depth - 1)
    elif word.endswith("es"):
        stem = _known(word[:-2], depth - 1)
    if stem is None and word.endswith("s") and not word.endswith("ss"):
        stem = _known(word[:-1], depth - 1)
    if stem is not None:
        return _with_s(stem)
    if word.endswith("ed"):
        for base in _bases(word[:-2]):
            if (stem := _known(base, depth - 1)) is not None:
                return _with_ed(stem)
    return None


def _suffixed(word: str, depth: int) -> str | None:
    for suffix, sound in _SUFFIXES.items():
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            for base in _bases(word.removesuffix(suffix)):
                if (stem := _known(base, depth - 1)) is not None:
                    return stem + sound
    return None


def _prefixed(word: str, depth: int) -> str | None:
    for prefix, sound in _PREFIXES.items():
        if word.startswith(prefix) and len(word) - len(prefix) >= 4:
            stem = _known(word.removeprefix(prefix), depth - 1)
            if stem is not None:
                return sound + stem
    return None


def _bases(stem: str) -> list[str]:
    """What a stem may be without its suffix: `mak` is make, `runn` is run, `happi` is happy."""
    bases = [stem, f"{stem}e"]
    if len(stem) > 2 and stem[-1] == stem[-2]:
        bases.append(stem[:-1])
    if stem.endswith("i"):
        bases.append(f"{stem[:-1]}y")
    return bases


def _compound(word: str) -> str | None:
    """Two words of the dictionary, the longest first."""
    words = dictionary()
    for place in range(len(word) - 3, 2, -1):
        first, second = words.get(word[:place]), _known(word[place:], 1)
        if first is not None and second is not None:
            return first + demoted(second)
    return None


def _guess(word: str) -> str:
    if not any(letter in "aeiouy" for letter in word):
        return "".join(spell(word))
    return sound_out(word.replace("'", ""))


def _with_s(stem: str) -> str:
    last = stem.rstrip("012")[-1:]
    if last in _SIBILANTS:
        return f"{stem}Iz"
    return f"{stem}{'s' if last in _VOICELESS else 'z'}"


def _with_ed(stem: str) -> str:
    last = stem.rstrip("012")[-1:]
    if last in "td":
        return f"{stem}Id"
    return f"{stem}{'t' if last in _VOICELESS or last in 'sSC' else 'd'}"


def begins_with_vowel(code: str) -> bool:
    return code[:1] in VOWELS
