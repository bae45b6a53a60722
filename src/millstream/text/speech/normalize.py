"""Writes out what is not a word: numbers, money, dates, times, units, addresses, abbreviations, symbols. English."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable

from millstream.text.speech.numbers import cardinal, digits, number, ordinal, plural, year
from millstream.text.speech.word_list import listed

_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_MONTH_NAMES = (
    {name.lower(): name for name in _MONTHS} | {name[:3].lower(): name for name in _MONTHS} | {"sept": "September"}
)
_MONTH = rf"(?:{'|'.join(sorted(_MONTH_NAMES, key=len, reverse=True))})"
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+"
_SCALE = r"(?:\s?(?:thousand|million|billion|trillion|[kmbKMB](?![a-zA-Z])))?"
_SCALE_WORDS = {"k": "thousand", "m": "million", "b": "billion"}
_MONEY = {
    "$": ("dollar", "cent"), "€": ("euro", "cent"), "£": ("pound", "penny"), "¥": ("yen", ""), "₹": ("rupee", "paisa"),
}  # fmt: skip
_UNITS = {
    "km": "kilometer", "m": "meter", "cm": "centimeter", "mm": "millimeter", "mi": "mile", "ft": "foot", "in": "inch",
    "kg": "kilogram", "g": "gram", "mg": "milligram", "lb": "pound", "lbs": "pound", "oz": "ounce", "l": "liter",
    "ml": "milliliter", "km/h": "kilometer per hour", "mph": "mile per hour", "m/s": "meter per second", "s": "second",
    "sec": "second", "ms": "millisecond", "min": "minute", "h": "hour", "hr": "hour", "hrs": "hour", "kb": "kilobyte",
    "mb": "megabyte", "gb": "gigabyte", "tb": "terabyte", "hz": "hertz", "khz": "kilohertz", "mhz": "megahertz",
    "ghz": "gigahertz", "w": "watt", "kw": "kilowatt", "kwh": "kilowatt hour", "v": "volt", "a": "amp",
    "mah": "milliamp hour",
    "°c": "degree Celsius", "°f": "degree Fahrenheit", "°": "degree", "px": "pixel", "db": "decibel",
}  # fmt: skip
_PLURALS = {"foot": "feet", "inch": "inches", "hertz": "hertz", "kilohertz": "kilohertz", "megahertz": "megahertz",
            "gigahertz": "gigahertz", "penny": "pence", "yen": "yen", "paisa": "paise"}  # fmt: skip
_ABBREVIATIONS = {
    "mr.": "mister", "mrs.": "missus", "ms.": "miz", "dr.": "doctor", "prof.": "professor", "sr.": "senior",
    "jr.": "junior", "vs.": "versus", "etc.": "et cetera", "e.g.": "for example", "i.e.": "that is",
    "approx.": "approximately",
    "dept.": "department", "inc.": "incorporated", "ltd.": "limited", "co.": "company", "corp.": "corporation",
    "gen.": "general", "col.": "colonel", "capt.": "captain", "lt.": "lieutenant", "sgt.": "sergeant",
    "rev.": "reverend",
    "ave.": "avenue", "blvd.": "boulevard", "mt.": "mount", "vol.": "volume", "fig.": "figure", "w/": "with",
    "w/o": "without",
}  # fmt: skip
_SYMBOLS = {
    "&": " and ", "+": " plus ", "=": " equals ", "@": " at ", "%": " percent ", "#": " number ", "×": " times ",
    "÷": " divided by ", "±": " plus or minus ", "≈": " about ", "≤": " at most ", "≥": " at least ",
    "<": " less than ",
    ">": " greater than ", "©": " copyright ", "™": " trademark ", "®": " registered ", "°": " degrees ", "→": " to ",
    "§": " section ", "^": " to the power of ", "~": " about ", "½": " one half ", "¼": " one quarter ",
    "¾": " three quarters ",
    "\\": " backslash ", "|": " ", "_": " ", "*": " ", "`": " ", "•": ", ",
}  # fmt: skip
_ROMAN = {"II": 2, "III": 3, "IV": 4, "VI": 6, "VII": 7, "VIII": 8, "IX": 9, "XI": 11, "XII": 12, "XIII": 13, "XIV": 14,
          "XV": 15, "XVI": 16, "XIX": 19, "XX": 20, "XXI": 21}  # fmt: skip
_KINGS = listed("king queen pope henry louis elizabeth charles george edward james william richard john paul")
_PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "‑": "-", "‐": "-", "−": "-", "\u00a0": " ",
                        "…": "...", "\u200b": None, "\u200d": None, "\ufe0f": None, "\u00ad": None})  # fmt: skip

_ADDRESS_SIGNS = {
    ".": "dot", "/": "slash", "-": "dash", "_": "underscore", "@": "at", "?": "question mark", "=": "equals",
    "&": "and", "#": "hash", ":": "colon", "%": "percent", "~": "tilde",
}  # fmt: skip

Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]


def normalize(text: str) -> str:
    """The text in words, letters and punctuation."""
    text = unicodedata.normalize("NFC", text).translate(_PLAIN)
    text = re.sub(r"(?<=\w)\s*—\s*(?=\w)|\s--\s", " — ", text)
    for pattern, rewrite in _RULES:
        text = pattern.sub(rewrite, text)
    for symbol, spoken in _SYMBOLS.items():
        text = text.replace(symbol, spoken)
    return " ".join(text.split())


def _address(match: re.Match[str]) -> str:
    text = re.sub(r"^(?:https?://)?(?:www\.)?", "", match[0]).rstrip("/")
    end = ""
    while text and text[-1] in ".,;:!?)":
        text, end = text[:-1], text[-1] + end
    for sign, spoken in _ADDRESS_SIGNS.items():
        text = text.replace(sign, f" {spoken} ")
    return text + end


def _plural(unit: str, value: str) -> str:
    if value.replace(",", "") in ("1", "1.0"):
        return unit
    head, _, tail = unit.partition(" ")
    if head in ("kilowatt", "milliamp"):
        return f"{unit}s"
    return f"{_PLURALS.get(head, head + 's')} {tail}".strip()


def _money(match: re.Match[str]) -> str:
    sign, value, scale = match[1], match[2], match[3].strip()
    name, small = _MONEY[sign]
    if scale:
        return f" {number(value)} {_SCALE_WORDS.get(scale.lower(), scale)} {_plural(name, '2')} "
    whole, _, cents = value.replace(",", "").partition(".")
    spoken = f"{number(whole or '0')} {_plural(name, whole)}"
    if small and len(cents) == 2:
        parts = [spoken] if int(whole or 0) or not int(cents) else []
        if int(cents):
            parts.append(f"{cardinal(int(cents))} {_plural(small, str(int(cents)))}")
        return f" {' and '.join(parts)} "
    return f" {number(value)} {_plural(name, value)} "


def _clock(match: re.Match[str]) -> str:
    hour, minute, half = int(match[1]), int(match[2]), (match[4] or "").replace(".", "").lower()
    if hour > 24 or minute > 59:
        return f"{cardinal(hour)} {cardinal(minute)}"
    if minute == 0:
        whole = "hundred" if hour > 12 else "o'clock"
        spoken = cardinal(hour) if half else f"{cardinal(hour)} {whole}"
    else:
        spoken = f"{cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)}"
    if match[3] and int(match[3]):
        spoken += f" and {cardinal(int(match[3]))} seconds"
    return f"{spoken} {half[0].upper()} M" if half else spoken


def _half(match: re.Match[str]) -> str:
    return f"{number(match[1])} {match[2][0].upper()} M"


def _date(years: str, month: str, day: str) -> str:
    if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
        return f"{digits(years)} {digits(month)} {digits(day)}"
    return f"{_MONTHS[int(month) - 1]} {ordinal(int(day))}, {_year(years)}"


def _year(text: str) -> str:
    return year(int(text)) if len(text) == 4 and 1000 <= int(text) <= 2999 else number(text)


def _month_day(match: re.Match[str]) -> str:
    name = _MONTH_NAMES[match[1].lower()]
    spoken = f"{name} {ordinal(int(match[2]))}"
    return spoken + (f", {_year(match[3])}" if match[3] else "")


def _day_month(match: re.Match[str]) -> str:
    name = _MONTH_NAMES[match[2].lower()]
    spoken = f"the {ordinal(int(match[1]))} of {name}"
    return spoken + (f", {_year(match[3])}" if match[3] else "")


def _plain_number(match: re.Match[str]) -> str:
    text = match[0]
    if re.fullmatch(r"\d{4}", text) and (1100 <= int(text) <= 1999 or 2001 <= int(text) <= 2099):
        return year(int(text))
    return number(text)


def _fraction(match: re.Match[str]) -> str:
    above, below = int(match[1]), int(match[2])
    if not 2 <= below <= 20 or above >= below:
        return f"{cardinal(above)} over {cardinal(below)}"
    name = {2: "half", 4: "quarter"}.get(below, ordinal(below))
    return f"{cardinal(above)} {name if above == 1 else {'half': 'halves'}.get(name, name + 's')}"


def _grouped(match: re.Match[str]) -> str:
    return ", ".join(digits(part) for part in match.groups())


def _ordinal(match: re.Match[str]) -> str:
    return ordinal(int(match[1])) if len(match[1]) < 16 else digits(match[1])


def _version(match: re.Match[str]) -> str:
    return f" {' point '.join(number(part) for part in match[1].split('.'))} "


def _measure(match: re.Match[str]) -> str:
    return f"{number(match[1])} {_plural(_UNITS[match[2].lower()], match[1])}"


def _scaled(match: re.Match[str]) -> str:
    return f"{number(match[1])} {_SCALE_WORDS[match[2].lower()]} "


def _roman(match: re.Match[str]) -> str:
    value = _ROMAN[match[2]]
    return f"{match[1]} {'the ' + ordinal(value) if match[1].lower() in _KINGS else cardinal(value)}"


def _rule(pattern: str, rewrite: Callable[[re.Match[str]], str], flags: int = re.IGNORECASE) -> Rule:
    return re.compile(pattern, flags), rewrite


def _any(words: Iterable[str]) -> str:
    """A pattern for any of these, the longest first."""
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


_DOMAINS = r"com|org|net|io|dev|ai|edu|gov|co\.uk|de|app"
_UNIT = _any(_UNITS)
_RULES: tuple[Rule, ...] = (
    _rule(r"\d{25,}", lambda match: f" {digits(match[0])} "),
    _rule(r"!?\[([^\]\n]{1,200})\]\([^)\s]{1,500}\)", lambda match: match[1]),
    _rule(r"(?<![\w.])[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+", _address),
    _rule(r"(?:https?://|www\.)[^\s<>\"]+", _address),
    _rule(rf"(?<![\w@.])(?:[a-z0-9-]{{2,40}}\.)+(?:{_DOMAINS})\b(?:/[^\s<>\"]*)?", _address),
    _rule(rf"\b(?:{_any(_ABBREVIATIONS)})(?=\s|$|[,;:)])", lambda match: _ABBREVIATIONS[match[0].lower()]),
    _rule(r"\bSt\.(?=\s+[A-Z])", lambda match: "Saint", 0),
    _rule(r"\bSt\.", lambda match: "Street", 0),
    _rule(r"\bNo\.\s?(?=\d)", lambda match: "number ", 0),
    _rule(rf"\b(\w+) ({_any(_ROMAN)})\b(?!')", _roman, 0),
    _rule(rf"([$€£¥₹])\s?({_NUMBER})({_SCALE})", _money),
    _rule(r"\b(\d{4})-(\d{1,2})-(\d{1,2})\b", lambda match: _date(match[1], match[2], match[3])),
    _rule(r"\b(\d{1,2})/(\d{1,2})/(\d{4})\b", lambda match: _date(match[3], match[1], match[2])),
    _rule(rf"\b({_MONTH})\.?\s+(\d{{1,2}})(?:st|nd|rd|th)?\b(?:,?\s+(\d{{4}})\b)?(?!:)", _month_day),
    _rule(rf"\b(\d{{1,2}})(?:st|nd|rd|th)?\s+({_MONTH})\b\.?(?:,?\s+(\d{{4}})\b)?", _day_month),
    _rule(r"\b(\d{1,2}):(\d{2})(?::(\d{2}))?(?:\s?([ap]\.m\.(?!\s*$)|[ap]\.?m\b))?", _clock),
    _rule(r"\b(\d{1,2})\s?([ap]\.m\.(?!\s*$)|[ap]\.?m\b)", _half),
    _rule(r"\(?\b(\d{3})\)?[-. ](\d{3})[-.](\d{4})\b", _grouped),
    _rule(r"\b(\d{3})-(\d{4})\b", _grouped),
    _rule(r"\b(\d+)(?:st|nd|rd|th)\b", _ordinal),
    _rule(r"\b(\d{3}0)s\b", lambda match: plural(year(int(match[1])))),
    _rule(r"'(\d0)s\b", lambda match: plural(cardinal(int(match[1])))),
    _rule(r"(?<![\d.])(\d+(?:\.\d+){2,})\b", _version),
    _rule(rf"(?<![\w.-])({_NUMBER})\s?-\s?(?=\d)", lambda match: f"{match[1]} to "),
    _rule(rf"(?<![\w.])-(?=(?:{_NUMBER}))", lambda match: "minus "),
    _rule(rf"({_NUMBER})\s?({_UNIT})(?![a-z°'])", _measure),
    _rule(r"\b(\d{1,2})/(\d{1,2})\b", _fraction),
    _rule(rf"(?<![\w.])({_NUMBER})(?=[kmb]\b)(\w)", _scaled),
    _rule(rf"({_NUMBER})%", lambda match: f"{number(match[1])} percent"),
    _rule(rf"(?:{_NUMBER})", lambda match: f" {_plain_number(match)} "),
    _rule(r"\s*/\s*", lambda match: " slash "),
)  # fmt: skip
"""Applied in this order."""
