"""Audio formats: each is decoded again and compared with what went in, whatever the pieces were."""

from __future__ import annotations

import importlib.util
import io
import wave
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import MediaRefused
from millstream.media.audio_encoding import (
    FORMATS,
    PLAIN,
    AudioFormat,
    AudioUnavailable,
    open_encoder,
    require_format,
)
from millstream.media.pcm import to_pcm16, wav_header
from millstream.media.resampling import Resampler
from millstream.media.wav import open_wav
from support.heard import alike, heard, level, spectrum

CODEC_DELAY = 0.11
"""Seconds of silence that MP3 and AAC may have around the sound."""


def chord(rate: int, seconds: float = 1.3) -> np.ndarray:
    """Tones below 4 kHz, louder and softer."""
    times = np.arange(int(rate * seconds)) / rate
    tones = sum(np.sin(2 * np.pi * hertz * times) / number for number, hertz in enumerate((300, 810, 1740, 3100), 1))
    return (0.3 * tones * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * times))).astype(np.float32)


def encoded(form: AudioFormat, samples: np.ndarray, rate: int, *, pieces: int = 4, whole: bool = False) -> bytes:
    encoder = open_encoder(form, rate, whole=whole)
    parts = [encoder.encode(piece) for piece in np.array_split(samples, pieces)]
    assert not whole or form == "pcm" or not any(parts)
    return b"".join([*parts, encoder.finish()])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("rate", [24_000, 16_000, 22_050, 44_100, 96_000])
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_heard_is_what_was_spoken(form: AudioFormat, rate: int, whole: bool) -> None:
    samples = chord(rate)
    made, made_rate = heard(encoded(form, samples, rate, whole=whole), form)
    seconds = len(samples) / rate
    assert len(made) / made_rate == pytest.approx(seconds, abs=CODEC_DELAY if form in ("mp3", "aac") else 0.001)
    energy = level(made) + 10 * np.log10(len(made) / made_rate / seconds)
    assert energy == pytest.approx(level(samples), abs=0.7)
    assert alike(spectrum(made, made_rate), spectrum(samples, rate)) > 0.97


@pytest.mark.parametrize("form", ["opus", "mp3", "aac", "flac", "wav", "pcm"])
def test_sound_comes_while_it_is_made(form: AudioFormat) -> None:
    """A client hears the first sentence before the last one exists."""
    encoder = open_encoder(form, 24_000)
    first = encoder.encode(chord(24_000, 2.0))
    made, rate = heard(first, form)
    assert len(made) / rate > 1.5


@pytest.mark.parametrize("form", ["flac", "wav"])
@pytest.mark.parametrize("pieces", [1, 3, 50])
def test_lossless_formats_keep_every_sample(form: AudioFormat, pieces: int) -> None:
    samples = chord(22_050)
    made, rate = heard(encoded(form, samples, 22_050, pieces=pieces), form)
    assert rate == 22_050
    np.testing.assert_allclose(made, samples, atol=2e-4 / 2)


def test_a_whole_wav_knows_its_length_and_a_stream_says_that_it_does_not() -> None:
    samples = chord(24_000)
    with wave.open(io.BytesIO(encoded("wav", samples, 24_000, whole=True))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
        assert file.getnframes() == len(samples)
    streamed = encoded("wav", samples, 24_000)
    assert streamed[:44] == wav_header(24_000, None)
    assert streamed[4:8] == streamed[40:44] == b"\xff\xff\xff\xff"
    np.testing.assert_allclose(open_wav(streamed).mono(), samples, atol=1e-4)
    with pytest.raises(MediaRefused, match="not a multiple of the block size 2"):
        open_wav(streamed[:-1])


@pytest.mark.parametrize("form", FORMATS)
def test_speech_without_samples_is_a_file_too(form: AudioFormat) -> None:
    encoder = open_encoder(form, 24_000)
    data = encoder.encode(np.zeros(0, np.float32)) + encoder.finish()
    assert bool(data) == (form not in ("pcm", "aac")), "only these have no header"


def test_what_is_too_loud_is_limited_and_never_wraps() -> None:
    loud = np.array([2, -2, 1, -1, 0, 1e30, -np.inf, np.inf, np.nan], np.float32)
    top = 32767
    assert np.frombuffer(to_pcm16(loud), "<i2").tolist() == [top, -top, top, -top, 0, top, -top, top, 0]


@pytest.mark.parametrize("form", FORMATS)
def test_a_sound_that_clips_keeps_its_pitch(form: AudioFormat) -> None:
    times = np.arange(24_000) / 24_000
    made, rate = heard(encoded(form, (3 * np.sin(2 * np.pi * 500 * times)).astype(np.float32), 24_000), form)
    power = np.abs(np.fft.rfft(made))
    assert np.fft.rfftfreq(len(made), 1 / rate)[power.argmax()] == pytest.approx(500, abs=2)
    assert level(made) > -3


def test_without_pyav_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "av" else find(name, *rest))
    for form in FORMATS:
        if form in PLAIN:
            require_format(form)
            continue
        with pytest.raises(AudioUnavailable, match=r"millstream\[audio\].*wav or pcm") as caught:
            open_encoder(form, 24_000)
        assert caught.value.status == 400


# Resampling


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([(24_000, 48_000), (22_050, 24_000), (44_100, 24_000), (16_000, 24_000), (11_025, 12_000)]),
    st.lists(st.integers(0, 900), max_size=8),
)
def test_pieces_make_no_difference(rates: tuple[int, int], sizes: list[int]) -> None:
    samples = np.random.default_rng(0).normal(size=sum(sizes)).astype(np.float32)
    whole, pieces = Resampler(*rates), Resampler(*rates)
    alone = np.concatenate([whole.push(samples), whole.finish()])
    parts = np.split(samples, np.cumsum(sizes)[:-1]) if sizes else []
    joined = np.concatenate([*(pieces.push(part) for part in parts), pieces.finish()])
    assert len(alone) == -(-len(samples) * rates[1] // rates[0])
    np.testing.assert_allclose(joined, alone, atol=1e-5)


@pytest.mark.parametrize("rates", [(24_000, 48_000), (44_100, 24_000), (16_000, 24_000), (48_000, 8_000)])
def test_a_tone_in_band_is_kept_in_place_and_one_out_of_band_is_removed(rates: tuple[int, int]) -> None:
    rate, target = rates

    def resampled(hertz: float) -> np.ndarray:
        resampler = Resampler(rate, target)
        tone = np.sin(2 * np.pi * hertz * np.arange(rate) / rate).astype(np.float32)
        return np.concatenate([resampler.push(tone), resampler.finish()])

    inner = slice(target // 10, -target // 10)
    low = np.sin(2 * np.pi * 1_000 * np.arange(target) / target)
    np.testing.assert_allclose(resampled(1_000)[inner], low[inner], atol=2e-3)
    if target < rate:
        assert np.abs(resampled(0.6 * target)[inner]).max() < 1e-3


@pytest.mark.parametrize("form", ["mp3", "opus", "aac", "flac"])
def test_files_that_are_made_at_once_do_not_mix(form: AudioFormat) -> None:
    sounds = [chord(24_000, 0.5) * share for share in (0.2, 0.5, 0.8, 1.0)]
    alone = [heard(encoded(form, sound, 24_000), form)[0] for sound in sounds]
    with ThreadPoolExecutor(len(sounds)) as pool:
        together = list(pool.map(lambda sound: heard(encoded(form, sound, 24_000), form)[0], sounds))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_that_nobody_finishes(form: AudioFormat) -> None:
    """Its client left."""
    for whole in (False, True):
        encoder = open_encoder(form, 24_000, whole=whole)
        encoder.encode(chord(24_000))
        del encoder
    assert encoded(form, chord(24_000), 24_000)
