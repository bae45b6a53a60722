"""Sentences as they are written, and what of a spoken answer was heard."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.service.realtime.sentences import MOST, SentenceSplitter
from millstream.service.realtime.spoken import SpokenText


def split(*pieces: str) -> list[str]:
    splitter = SentenceSplitter()
    found = [sentence for piece in pieces for sentence in splitter.feed(piece)]
    return [*found, rest] if (rest := splitter.flush()) else found


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("It is noon. Time to eat something.", ["It is noon.", " Time to eat something."]),
        ("Hi! How are you today? Fine.", ["Hi!", " How are you today?", " Fine."]),
        ("Dr. Smith paid 3.50 to Mr. Jones today. He left.", ["Dr. Smith paid 3.50 to Mr. Jones today.", " He left."]),
        ("First line of it\nsecond line", ["First line of it\n", "second line"]),
        ("1. Bring a bag of flour.\n", ["1. Bring a bag of flour.", "\n"]),
        ("今日は天気がとてもいいですね。散歩に行きましょう、そして帰りましょう。", None),
        ("Yes. No. Maybe so, if you like. ", ["Yes.", " No. Maybe so, if you like.", " "]),
    ],
)
def test_sentences(text: str, sentences: list[str] | None) -> None:
    found = split(*text)
    assert "".join(found) == text
    assert found == sentences if sentences is not None else len(found) == 2


@given(st.text(alphabet="ab .!?\n,。\"'1", max_size=800), st.integers(1, 50))
def test_nothing_is_lost_and_nothing_is_endless(text: str, size: int) -> None:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    found = split(*pieces)
    assert "".join(found) == text
    assert all(len(sentence) <= MOST for sentence in found[:-1])


def test_words_are_heard_in_proportion() -> None:
    spoken = SpokenText()
    for sentence, ms in (("One two three. ", 1000), ("Four five six.", 500), ("Never begun.", 0)):
        spoken.begin(sentence)
        spoken.add_audio(ms)
    assert spoken.end_ms == 1500
    assert spoken.text == "One two three. Four five six."
    heard = {ms: spoken.heard_until(ms) for ms in (0, 300, 500, 1000, 1200, 1499)}
    assert heard == {
        0: "",
        300: "One",
        500: "One two",
        1000: "One two three. ",
        1200: "One two three. Four",
        1499: "One two three. Four five",
    }
    assert spoken.heard_until(1500).startswith("One two three. Four five six.")
