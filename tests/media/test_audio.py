"""Sounds: WAV files of every form, at any rate; and what is refused."""

from __future__ import annotations

import importlib.util
import io
import struct
import wave

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import MediaRefused
from millstream.media.audio import open_sound, resampled
from millstream.media.limits import MediaLimits
from millstream.media.wav import open_wav
from support.audio_files import chunk, riff, tone, wav
from support.films import film, pictures

FORM = struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16)
HALF = tone(440, 0.5)


def opened(data: bytes, rate: int = 16_000, most: float = 30.0, **limits: float) -> np.ndarray:
    return open_sound(data, MediaLimits(**limits), rate=rate, most=most)  # type: ignore[arg-type]


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(
    "code, bits, close", [(1, 8, 9e-3), (1, 16, 4e-5), (1, 24, 2e-7), (1, 32, 1e-7), (3, 32, 0), (3, 64, 0)]
)
def test_every_width(code: int, bits: int, close: float, extensible: bool) -> None:
    made = opened(wav(HALF, bits=bits, code=code, extensible=extensible))
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, HALF, atol=close)


def test_the_extremes_of_a_width() -> None:
    raw = {8: b"\x00\x80\xff", 16: b"\x00\x80\x00\x00\xff\x7f", 24: b"\x00\x00\x80\x00\x00\x00\xff\xff\x7f"}
    for bits, body in raw.items():
        form = struct.pack("<HHIIHH", 1, 1, 16_000, 0, bits // 8, bits)
        made = open_wav(riff(chunk(b"fmt ", form), chunk(b"data", body))).mono()
        assert made.tolist() == pytest.approx([-1, 0, 1], abs=1.1 * 2.0 ** (1 - bits))


def test_what_the_standard_library_writes() -> None:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(np.array([[100, 300], [-32768, 0]], "<i2").tobytes())
    assert opened(buffer.getvalue()).tolist() == [200 / 32768, -0.5]


def test_channels_become_one() -> None:
    both = np.stack([HALF, -HALF, HALF], axis=1)
    np.testing.assert_allclose(opened(wav(both)), HALF / 3, atol=1e-4)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 44_101, 48_000, 96_000, 192_000, 15_999])
def test_a_tone_stays_the_same_at_any_rate(rate: int) -> None:
    def smooth(at: int) -> np.ndarray:
        times = np.arange(at) / at
        return (0.5 * np.sin(2 * np.pi * 1000 * times) * np.sin(np.pi * times) ** 2).astype(np.float32)

    made = resampled(smooth(rate), rate, 16_000)
    assert len(made) == 16_000
    np.testing.assert_allclose(made, smooth(16_000), atol=1e-5)


def test_tones_above_the_band_are_left_out_and_do_not_fold() -> None:
    times = np.arange(48_000) / 48_000
    high = (0.5 * np.sin(2 * np.pi * 11_000 * times)).astype(np.float32)
    assert np.abs(resampled(high, 48_000, 16_000)[800:-800]).max() < 2e-4


def test_nothing_comes_in_at_the_other_end() -> None:
    sudden = np.zeros(44_100, np.float32)
    sudden[-200:] = 1
    assert np.abs(resampled(sudden, 44_100, 16_000)[:8_000]).max() < 1e-4


@given(
    count=st.integers(1, 3000),
    rate=st.one_of(st.integers(1_000, 192_000), st.sampled_from([8_000, 44_100, 48_000])),
)
def test_the_length_is_kept(count: int, rate: int) -> None:
    made = resampled(np.ones(count, np.float32), rate, 16_000)
    assert len(made) == -(-count * 16_000 // rate)
    assert np.isfinite(made).all()


ABSURD = {
    "rate 0": (struct.pack("<HHIIHH", 1, 1, 0, 0, 2, 16), "0 samples a second; 1000 to 192000 are read"),
    "rate of gigahertz": (struct.pack("<HHIIHH", 1, 1, 2**32 - 1, 0, 2, 16), "4294967295 samples a second"),
    "no channels": (struct.pack("<HHIIHH", 1, 0, 16_000, 0, 0, 16), "0 channels"),
    "many channels": (struct.pack("<HHIIHH", 1, 65535, 16_000, 0, 0, 16), "65535 channels"),
    "blocks that do not fit": (struct.pack("<HHIIHH", 1, 2, 16_000, 0, 2, 16), "in blocks of 2 bytes"),
    "12 bits": (struct.pack("<HHIIHH", 1, 1, 16_000, 0, 2, 12), "samples of 12 bits in format 1; PCM of 8, 16"),
    "ADPCM": (struct.pack("<HHIIHH", 2, 1, 16_000, 0, 2, 4), "format ADPCM"),
    "MP3 in a WAV": (struct.pack("<HHIIHH", 85, 1, 16_000, 0, 1, 0), "format MP3"),
    "half floats": (struct.pack("<HHIIHH", 3, 1, 16_000, 0, 2, 16), "floats of 32 and 64 are read: convert it"),
    "a format that is cut": (FORM[:10], "its format is cut off"),
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_headers(name: str) -> None:
    form, words = ABSURD[name]
    with pytest.raises(MediaRefused) as refused:
        opened(riff(chunk(b"fmt ", form), chunk(b"data", bytes(64))))
    assert words in refused.value.message


DAMAGED = {
    "4 GB of samples": (riff(chunk(b"fmt ", FORM), chunk(b"data", bytes(8), 2**32 - 1)), "of 4294967295 bytes where 8"),
    "cut off": (wav(HALF)[:-100], "where 15900 follow. It was cut off"),
    "a chunk too long": (riff(chunk(b"fmt ", FORM), chunk(b"LIST", b"ab", 99)), "bytes where 2 follow"),
    "no samples": (wav(HALF[:0]), "has no samples"),
    "no data": (riff(chunk(b"fmt ", FORM)), "it has no samples"),
    "no format": (riff(chunk(b"data", bytes(8))), "samples before their format"),
    "half a sample": (riff(chunk(b"fmt ", FORM), chunk(b"data", bytes(7))), "not whole blocks of 2"),
    "NaN": (wav(np.array([0.1, np.nan]), code=3, bits=32), "no numbers (NaN or infinite)"),
    "infinite": (wav(np.array([0.1, np.inf]), code=3, bits=64), "no numbers"),
    "too large for a float": (wav(np.array([0.1, 1e300]), code=3, bits=64), "no numbers"),
    "only a beginning": (b"RIFF", "no sound that can be read: WAV is"),
    "a text": (b"hello, this is no sound at all", "no sound that can be read: WAV is"),
    "MP3 with a tag": (b"ID3\x04" + bytes(50), "this sound is damaged"),
    "MP3": (b"\xff\xfb\x90\x00" + bytes(50), "sound"),
    "M4A": (b"\0\0\0\x20ftypM4A " + bytes(50), "this sound is damaged"),
    "Ogg": (b"OggS" + bytes(50), "this sound is damaged"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_and_other_formats(name: str) -> None:
    data, words = DAMAGED[name]
    with pytest.raises(MediaRefused) as refused:
        opened(data)
    assert words in refused.value.message


@given(st.binary(max_size=80), st.integers(0, 60))
def test_any_bytes_are_read_or_refused(noise: bytes, keep: int) -> None:
    try:
        made = opened(wav(HALF[:10])[:keep] + noise)
    except MediaRefused:
        return
    assert np.isfinite(made).all()


def test_long_sounds() -> None:
    with pytest.raises(MediaRefused, match=r"2\.00 s long; this server takes 1 s \(--media-seconds\)"):
        opened(wav(tone(440, 2)), sound=1)
    with pytest.raises(MediaRefused, match=r"2\.00 s long; this model hears 1\.5 s at a time. Send it in several"):
        opened(wav(tone(440, 2)), most=1.5)
    slow = struct.pack("<HHIIHH", 1, 1, 1_000, 1_000, 1, 8)
    with pytest.raises(MediaRefused, match=r"20000\.00 s long"):
        opened(riff(chunk(b"fmt ", slow), chunk(b"data", bytes(20_000_000))))


CODED = [
    ("mp3", "libmp3lame"),
    ("ogg", "libopus"),
    ("flac", "flac"),
    ("mp4", "aac"),
    ("adts", "aac"),
    ("webm", "libopus"),
]


def coded_tone(kind: str, codec: str, seconds: float = 1.0, rate: int = 48_000) -> bytes:
    """A tone of 440 Hz in two channels."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout="stereo")
        sound = np.repeat(tone(440, seconds, rate)[np.newaxis], 2, axis=0)
        resampler = av.AudioResampler(format=stream.codec_context.format, layout="stereo", rate=rate)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound), format="fltp", layout="stereo")
        frame.rate = rate
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode())
    return buffer.getvalue()


@pytest.mark.parametrize(("kind", "codec"), CODED)
def test_coded_sounds_are_heard_as_they_were(kind: str, codec: str) -> None:
    made = opened(coded_tone(kind, codec), seconds=60.0)
    assert made.dtype == np.float32 and 15_000 < len(made) < 18_500
    middle = made[4_000:12_000] * np.hanning(8_000)
    spectrum = np.abs(np.fft.rfft(middle))
    assert np.argmax(spectrum) * 2 == 440
    assert np.sum(spectrum[210:231] ** 2) > 0.99 * np.sum(spectrum**2)
    assert np.abs(middle).max() == pytest.approx(0.5, abs=0.05)


def test_coded_sounds_that_are_too_long() -> None:
    data = coded_tone("mp3", "libmp3lame", seconds=5.0)
    with pytest.raises(MediaRefused, match=r"over 1\.5 s long; this model hears 1\.5 s"):
        opened(data, most=1.5, seconds=60.0)
    with pytest.raises(MediaRefused, match=r"over 1 s long; this server takes 1 s \(--media-seconds\)"):
        opened(data, sound=1, seconds=60.0)


def test_a_video_without_sound_and_a_codec_that_is_not_read() -> None:
    with pytest.raises(MediaRefused, match="no stream of sound"):
        opened(film(pictures(3)), seconds=60.0)
    with pytest.raises(MediaRefused, match="coded as adpcm_ima_qt; this server reads WAV and mp3, aac"):
        opened(coded_tone("mov", "adpcm_ima_qt"), seconds=60.0)


@settings(max_examples=15, deadline=None)
@given(cut=st.integers(20, 3_000), flips=st.lists(st.tuples(st.integers(0, 2_999), st.integers(1, 255)), max_size=6))
def test_damaged_coded_sounds_are_heard_or_refused(cut: int, flips: list[tuple[int, int]]) -> None:
    data = bytearray(MP3[:cut])
    for place, bits in flips:
        if place < len(data):
            data[place] ^= bits
    try:
        made = opened(bytes(data), seconds=60.0)
    except MediaRefused:
        return
    assert np.isfinite(made).all()


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "av" else find(name, *rest))
    with pytest.raises(MediaRefused, match=r"millstream\[video\].* WAV is read without it: convert it with: ffmpeg"):
        opened(MP3)
    assert len(opened(wav(HALF))) == 8_000


MP3 = coded_tone("mp3", "libmp3lame", seconds=0.3)
