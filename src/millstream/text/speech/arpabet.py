"""CMUdict's phonemes, one letter each: that makes the dictionary small and its entries easy to cut."""

from __future__ import annotations

from collections.abc import Iterator

CODES = {
    "AA": "A", "AE": "@", "AH": "^", "AO": "O", "AW": "W", "AY": "Y", "EH": "E", "ER": "R", "EY": "e", "IH": "I",
    "IY": "i", "OW": "o", "OY": "J", "UH": "U", "UW": "u",
    "B": "b", "CH": "C", "D": "d", "DH": "D", "F": "f", "G": "g", "HH": "h", "JH": "j", "K": "k", "L": "l", "M": "m",
    "N": "n", "NG": "N", "P": "p", "R": "r", "S": "s", "SH": "S", "T": "t", "TH": "T", "V": "v", "W": "w", "Y": "y",
    "Z": "z", "ZH": "Z",
}  # fmt: skip
VOWELS = frozenset("A@^OWYERIieoJUu")
"""A digit after a vowel is its stress: 1 primary, 2 secondary, none unstressed."""

Phone = tuple[str, int]
"""A code and its stress."""


def encode(phones: list[str]) -> str:
    """CMUdict's words for phonemes, such as `AH0`, as codes."""
    coded = []
    for phone in phones:
        name = phone.rstrip("012")
        stress = phone[len(name) :]
        coded.append(CODES[name] + (stress if stress in ("1", "2") else ""))
    return "".join(coded)


def phones(code: str) -> Iterator[Phone]:
    """The phonemes of an entry."""
    for place, letter in enumerate(code):
        if not letter.isdigit():
            after = code[place + 1 : place + 2]
            yield letter, int(after) if after.isdigit() else 0


def unstressed(code: str) -> str:
    return code.replace("1", "").replace("2", "")


def demoted(code: str) -> str:
    """Its primary stress as a secondary one: for the second part of a compound."""
    return code.replace("1", "2")
