"""Numbers, money, dates, times, units, addresses and abbreviations in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.text.speech.normalize import normalize
from millstream.text.speech.numbers import cardinal, ordinal, year


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("12 apples", "twelve apples"),
        ("1,234,567.05", "one million two hundred thirty four thousand five hundred sixty seven point zero five"),
        ("-5 or .5", "minus five or zero point five"),
        ("007", "zero zero seven"),
        ("In 1984, 2005 and 1900", "In nineteen eighty four , two thousand five and nineteen hundred"),
        ("the 1990s", "the nineteen nineties"),
        ("1st 2nd 3rd 21st 100th", "first second third twenty first one hundredth"),
        ("$5", "five dollars"),
        ("$1", "one dollar"),
        ("$0.99", "ninety nine cents"),
        ("$1,234.56", "one thousand two hundred thirty four dollars and fifty six cents"),
        ("€5 million", "five million euros"),
        ("£2.50", "two pounds and fifty pence"),
        ("3:45 pm", "three forty five P M"),
        ("9:05", "nine oh five"),
        ("12:00", "twelve o'clock"),
        ("9 a.m. today", "nine A M today"),
        ("2024-03-15", "March fifteenth, twenty twenty four"),
        ("3/15/2024", "March fifteenth, twenty twenty four"),
        ("March 15, 2024", "March fifteenth, twenty twenty four"),
        ("15 March", "the fifteenth of March"),
        ("Jan. 1", "January first"),
        ("20%", "twenty percent"),
        ("60 km/h", "sixty kilometers per hour"),
        ("1 kg", "one kilogram"),
        ("-5°C", "minus five degrees Celsius"),
        ("10-20 kg", "ten to twenty kilograms"),
        ("3/4 of it", "three quarters of it"),
        ("version 1.2.3", "version one point two point three"),
        ("555-123-4567", "five five five, one two three, four five six seven"),
        ("Dr. Smith vs. Mr. Jones, etc.", "doctor Smith versus mister Jones, et cetera"),
        ("St. Peter on Main St.", "Saint Peter on Main Street"),
        ("e.g. this", "for example this"),
        ("Henry VIII, World War II", "Henry the eighth, World War two"),
        ("https://www.example.com/a-b.", "example dot com slash a dash b."),
        ("bob@mail.org", "bob at mail dot org"),
        ("see example.com now", "see example dot com now"),
        ("[a link](https://x.y)", "a link"),
        ("**bold** `code`", "bold code"),
        ("R&D + 1 = 2", "R and D plus one equals two"),
        ("", ""),
    ],
)
def test_it_is_said_in_words(text: str, spoken: str) -> None:
    assert normalize(text) == spoken


def test_numbers() -> None:
    assert cardinal(0) == "zero"
    assert cardinal(1_000_001) == "one million one"
    assert cardinal(-42) == "minus forty two"
    assert [ordinal(number) for number in (5, 9, 12, 20, 101)] == [
        "fifth",
        "ninth",
        "twelfth",
        "twentieth",
        "one hundred first",
    ]
    assert [year(number) for number in (1066, 1907, 2000, 2024)] == [
        "ten sixty six",
        "nineteen oh seven",
        "two thousand",
        "twenty twenty four",
    ]


@given(st.text(max_size=300))
def test_no_text_breaks_it_and_no_digits_of_ours_stay(text: str) -> None:
    assert not set("0123456789") & set(normalize(text))
