"""From CMUdict's phonemes to Kokoro's alphabet, as it was trained to read American and British English.

A stress mark stands before its vowel, not before its syllable. Diphthongs are capital letters: A (day), I (my), O (go,
American), Q (go, British), W (now), Y (boy).
"""

from __future__ import annotations

from millstream.text.speech.arpabet import VOWELS, phones

_STRESS = ("", "ˈ", "ˌ")

_CONSONANTS = {
    "b": "b", "C": "ʧ", "d": "d", "D": "ð", "f": "f", "g": "ɡ", "h": "h", "j": "ʤ", "k": "k", "l": "l", "m": "m",
    "n": "n", "N": "ŋ", "p": "p", "r": "ɹ", "s": "s", "S": "ʃ", "t": "t", "T": "θ", "v": "v", "w": "w", "y": "j",
    "z": "z", "Z": "ʒ",
}  # fmt: skip
_AMERICAN = {
    "A": "ɑ", "@": "æ", "^": "ʌ", "O": "ɔ", "W": "W", "Y": "I", "E": "ɛ", "R": "ɜɹ", "e": "A", "I": "ɪ", "i": "i",
    "o": "O", "J": "Y", "U": "ʊ", "u": "u",
}  # fmt: skip
_BRITISH = {
    "A": "ɒ", "@": "a", "^": "ʌ", "O": "ɔː", "W": "W", "Y": "I", "E": "ɛ", "R": "ɜː", "e": "A", "I": "ɪ", "i": "iː",
    "o": "Q", "J": "Y", "U": "ʊ", "u": "uː",
}  # fmt: skip
_BEFORE_R = {"A": "ɑː", "O": "ɔː", "E": "ɛː", "I": "ɪə", "i": "ɪə", "U": "ʊə", "u": "ʊə"}
"""British vowels before an r, which is silent unless a vowel follows."""


def american(code: str) -> str:
    sounds = list(phones(code))
    spoken = []
    for place, (sound, stress) in enumerate(sounds):
        before = sounds[place - 1] if place else ("", 0)
        after = sounds[place + 1] if place + 1 < len(sounds) else ("", 0)
        if sound not in VOWELS:
            nasal = [each for each, _ in sounds[place + 1 :]] == ["^", "n"]  # button, certain
            spoken.append("T" if _is_flap(sound, before, after) and not nasal else _CONSONANTS[sound])
        elif sound in "I^" and not stress and _is_ending(sounds, place):
            spoken.append("ᵻ")
        elif sound == "^" and not stress:
            last = place + 2 == len(sounds)
            spoken.append("ᵊ" if after[0] == "l" and last and before[0] not in VOWELS and place else "ə")
        elif sound == "R" and not stress:
            spoken.append("əɹ")
        else:
            vowel = "ɪ" if sound == "i" and after[0] == "r" else _AMERICAN[sound]
            spoken.append(_STRESS[stress] + vowel)
    return "".join(spoken)


def british(code: str, spelling: str = "") -> str:
    sounds = list(phones(code))
    spoken = []
    for place, (sound, stress) in enumerate(sounds):
        after = sounds[place + 1][0] if place + 1 < len(sounds) else ""
        beyond = sounds[place + 2][0] if place + 2 < len(sounds) else ""
        if sound == "r":
            spoken.append("ɹ" if after in VOWELS and after else "")
        elif sound not in VOWELS:
            spoken.append(_CONSONANTS[sound])
        elif sound == "R":
            vowel = "ɜː" if stress else "ə"
            spoken.append(_STRESS[stress] + vowel + ("ɹ" if after in VOWELS and after else ""))
        elif sound == "^" and not stress:
            spoken.append("ə")
        elif sound == "i" and not stress:
            spoken.append("i")
        elif after == "r" and sound in _BEFORE_R and (not beyond or beyond not in VOWELS):
            spoken.append(_STRESS[stress] + _BEFORE_R[sound])
        elif sound == "A" and "o" not in spelling:
            spoken.append(_STRESS[stress] + "ɑː")
        else:
            spoken.append(_STRESS[stress] + _BRITISH[sound])
    return "".join(spoken)


def _is_flap(sound: str, before: tuple[str, int], after: tuple[str, int]) -> bool:
    """An American t between vowels is a flap, unless the second one is stressed: better, city, what a."""
    return sound == "t" and (before[0] in VOWELS or before[0] == "r") and after[0] in VOWELS and not after[1]


def _is_ending(sounds: list[tuple[str, int]], place: int) -> bool:
    """The vowel of the endings -es and -ed."""
    if place + 2 != len(sounds) or place == 0:
        return False
    last, before = sounds[-1][0], sounds[place - 1][0]
    return (last == "z" and before in "szSZCj") or (last == "d" and before in "td")
