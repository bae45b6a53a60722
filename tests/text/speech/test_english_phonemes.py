"""English text in Kokoro's phonemes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.text.speech.english import EnglishPhonemes
from millstream.text.speech.lexicon import dictionary
from millstream.text.speech.words import pronounce

american, british = EnglishPhonemes(), EnglishPhonemes(british_accent=True)
SYMBOLS = set(" .,!?;:—()AIOQTWYæðŋɑɐɒɔəɛɜɡɪɹʃʊʌʒʤʧθᵊᵻˈˌːabcdefhijklmnopqrstuvwxyz")


@pytest.mark.parametrize(
    ("text", "phonemes"),
    [
        ("Hello world, this is a test of speech.", "həlˈO wˈɜɹld, ðɪs ɪz ɐ tˈɛst ʌv spˈiʧ."),
        ("The quick brown fox.", "ðə kwˈɪk bɹˈWn fˈɑks."),
        ("the apple, to each", "ði ˈæpᵊl, tʊ ˈiʧ"),
        ("better little city", "bˈɛTəɹ lˈɪTᵊl sˈɪTi"),
        ("wanted houses", "wˈɔntᵻd hˈWsᵻz"),
        ("NASA, the FBI and AI", "nˈæsə, ði ˈɛfbˈiˈI ænd ˌAˈI"),
        ("US", "jˌuˈɛs"),
        ("I read it yesterday.", "ˌI ɹˈɛd ɪt jˈɛstəɹdˌA."),
        ("I will read it.", "ˌI wɪl ɹˈid ɪt."),
        ("to record the record", "tə ɹəkˈɔɹd ðə ɹˈɛkəɹd"),
        ("Café", "kəfˈA"),
        ("Wait... what?!", "wˈAt. wˈʌt?"),
        ("🎉 ∮ 漢字", ""),
        ("¿?", ""),
    ],
)
def test_american(text: str, phonemes: str) -> None:
    assert american(text) == phonemes


@pytest.mark.parametrize(
    ("text", "phonemes"),
    [
        ("Hello car park.", "həlˈQ kˈɑː pˈɑːk."),
        ("better here", "bˈɛtə hˈɪə"),
        ("a lot of bath tea", "ɐ lˈɒt ɒv bˈaθ tˈiː"),
    ],
)
def test_british(text: str, phonemes: str) -> None:
    assert british(text) == phonemes


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("millstream's", "mI1lstri2mz"),
        ("unlockable", "^nlA1k^b^l"),
        ("rebooted", "ribu1tId"),
        ("startups", "stA1rt^2ps"),
        ("zorbing", "zO1rbIN"),
        ("xqz", "E2kskyu2zi1"),
    ],
)
def test_words_that_no_dictionary_has(word: str, code: str) -> None:
    assert word not in dictionary() or word == "startups"
    assert pronounce(word) == code


@given(st.text(max_size=200))
def test_any_text_gives_symbols_that_the_model_knows(text: str) -> None:
    for phonemes in (american(text), british(text)):
        assert set(phonemes) <= SYMBOLS


def test_the_dictionary_is_whole() -> None:
    words = dictionary()
    assert len(words) > 120_000
    assert (words["aardvark"], words["zygote"]) == ("A1rdvA2rk", "zY1got")
