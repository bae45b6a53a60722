"""Numbers in English words."""

from __future__ import annotations

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SCALES = ("", "thousand", "million", "billion", "trillion", "quadrillion", "quintillion")
_ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
    "twelve": "twelfth",
}  # fmt: skip
MAX_DIGITS = 21
"""Longer numbers are read digit by digit."""


def cardinal(number: int) -> str:
    if number < 0:
        return f"minus {cardinal(-number)}"
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f" {_ONES[ones]}" if ones else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{_ONES[hundreds]} hundred" + (f" {cardinal(rest)}" if rest else "")
    groups = []
    while number:
        number, group = divmod(number, 1000)
        groups.append(group)
    return " ".join(
        f"{cardinal(group)} {_SCALES[scale]}".strip() for scale, group in reversed(list(enumerate(groups))) if group
    )


def ordinal(number: int) -> str:
    *before, last = cardinal(number).split()
    regular = f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th"
    return " ".join([*before, _ORDINALS.get(last, regular)])


def digits(text: str) -> str:
    """Digit by digit."""
    return " ".join(_ONES[int(digit)] for digit in text if digit.isdigit())


def number(text: str) -> str:
    """A number as it is written: with commas, a point, a sign."""
    text = text.replace(",", "")
    sign = "minus " if text.startswith(("-", "−")) else ""
    whole, point, fraction = text.lstrip("+-−").partition(".")
    if len(whole) > MAX_DIGITS or (len(whole) > 1 and whole.startswith("0")):
        spoken = digits(whole)
    else:
        spoken = cardinal(int(whole or 0))
    return sign + spoken + (f" point {digits(fraction)}" if point and fraction else "")


def year(value: int) -> str:
    """1984 is nineteen eighty four; 2005 is two thousand five; 1900 is nineteen hundred."""
    century, rest = divmod(value, 100)
    if value % 1000 < 10 and value % 1000 != 0:
        return cardinal(value)
    if value % 1000 == 0:
        return cardinal(value)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def plural(spoken: str) -> str:
    """The plural of a number in words: twenties, nineties, hundreds."""
    return f"{spoken[:-1]}ies" if spoken.endswith("y") else f"{spoken}s"
