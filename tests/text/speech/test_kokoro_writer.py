"""Texts for Kokoro: pieces, voices, languages and tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import BadRequest
from millstream.text.speech.kokoro import MAX_PHONEMES, KokoroWriter
from millstream.text.speech.script import Script
from millstream.text.speech.sentences import CHARACTERS, MAX_CHARACTERS, pieces
from support.tiny_kokoro import CONFIG, VOICES

VOCAB = CONFIG["vocab"]
SYMBOLS = {token: symbol for symbol, token in VOCAB.items()}


def said(script: Script) -> list[str]:
    return ["".join(SYMBOLS[token] for token in line.tokens) for line in script.lines]


@pytest.fixture(scope="module")
def writer() -> KokoroWriter:
    return KokoroWriter(VOCAB, VOICES, 298)


def test_sentences_are_pieces_and_the_first_is_short(writer: KokoroWriter) -> None:
    text = "Hello there, Mr. Smith of the U.S. army. " + "This is one more sentence of some length. " * 6
    found = pieces(text)
    assert found[0] == "Hello there, Mr. Smith of the U.S. army."
    assert " ".join(found) == text.strip()
    assert all(len(piece) < CHARACTERS for piece in found)
    assert len(said(writer.write(text, voice=None, language=None))) == len(found)


def test_a_long_first_sentence_is_cut_at_its_first_clause() -> None:
    text = "When the mill was built, nobody thought that it would stand for so long, and yet it still does, today."
    assert pieces(text)[0] == "When the mill was built,"


@given(st.text(max_size=1500))
def test_pieces_have_all_words_and_a_bounded_length(text: str) -> None:
    found = pieces(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(piece.strip() and len(piece) <= MAX_CHARACTERS for piece in found)


def test_a_piece_has_no_more_phonemes_than_the_model_takes(writer: KokoroWriter) -> None:
    for text in ("antidisestablishmentarianism " * 40, "x" * 3000, "1" * 900):
        lines = said(writer.write(text, voice=None, language=None))
        assert lines and all(0 < len(line) <= MAX_PHONEMES for line in lines)


def test_lines_are_prepared_when_they_are_asked_for(writer: KokoroWriter) -> None:
    script = writer.write("A sentence of a book that is long. " * 5000, voice=None, language=None)
    assert len(list(itertools.islice(script.lines, 2))) == 2


def test_phonemes_can_be_given(writer: KokoroWriter) -> None:
    assert said(writer.write("/həlˈO wˈɜɹld/", voice=None, language=None)) == ["həlˈO wˈɜɹld"]


def test_nothing_to_speak_gives_no_lines(writer: KokoroWriter) -> None:
    for text in ("🎉", "...", " \n "):
        assert said(writer.write(text, voice=None, language=None)) == []


@pytest.mark.parametrize(
    ("voice", "mix"),
    [
        (None, (("af_heart", 1.0),)),
        ("af_bella", (("af_bella", 1.0),)),
        ("AF_Bella", (("af_bella", 1.0),)),
        ("af_bella+am_adam", (("af_bella", 1.0), ("am_adam", 1.0))),
        ("af_bella(2) + bf_emma(0.5)", (("af_bella", 2.0), ("bf_emma", 0.5))),
        ("coral", (("af_bella", 1.0),)),
        ("Marin", (("af_heart", 1.0),)),
        ("alloy", (("af_bella", 1.0),)),
    ],
)
def test_voices(voice: str | None, mix: tuple[tuple[str, float], ...], writer: KokoroWriter) -> None:
    assert writer.write("a", voice=voice, language=None).voice == mix


@pytest.mark.parametrize(
    ("voice", "message"),
    [
        ("af_bela", "there is no voice 'af_bela'. Did you mean af_bella?"),
        ("zzz", "there is no voice 'zzz'. Voices: af_bella, af_heart, am_adam, bf_emma. GET /v1/audio/voices"),
        ("af_bella(", "cannot be read"),
        ("af_bella(0)", "above 0"),
        ("+", "cannot be read"),
        ("+".join(["af_bella"] * 9), "mixes 9 voices"),
    ],
)
def test_voices_that_there_are_not(voice: str, message: str, writer: KokoroWriter) -> None:
    with pytest.raises(BadRequest) as raised:
        writer.write("a", voice=voice, language=None)
    assert message in raised.value.message and raised.value.param == "voice"


def test_languages(writer: KokoroWriter) -> None:
    assert said(writer.write("car", voice="bf_emma", language=None)) == ["kˈɑː"]
    assert said(writer.write("car", voice="bf_emma", language="en-US")) == ["kˈɑɹ"]
    assert said(writer.write("car", voice="af_bella", language="b")) == ["kˈɑː"]
    with pytest.raises(BadRequest, match="eSpeak NG, which is not installed"):
        writer.write("bonjour", voice=None, language="fr")
    with pytest.raises(BadRequest, match="not one of Kokoro's: en, en-us"):
        writer.write("hallo", voice=None, language="de")


def test_espeak_speaks_other_languages_if_it_is_there() -> None:
    asked = []

    def run(text: str, language: str) -> str:
        asked.append((text, language))
        return {"Salut": "salˈy\n", "t^ʃao": "t^ʃao"}.get(text, "t^ʃao")

    writer = KokoroWriter(VOCAB, VOICES, 298, espeak=run)
    assert said(writer.write("Salut, ciao!", voice=None, language="fr")) == ["salˈy, ʧao!"]
    assert asked == [("Salut", "fr-fr"), ("ciao", "fr-fr")]
