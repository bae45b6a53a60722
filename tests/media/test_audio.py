"""Audio files: WAV of every width and rate, compressed formats, and the errors for damaged ones."""

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
from millstream.media.audio import open_audio, resample
from millstream.media.limits import MediaLimits
from millstream.media.wav import open_wav
from support.audio_files import chunk, riff, tone, wav
from support.video_files import encode_video, pictures

FORM = struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16)
HALF = tone(440, 0.5)


def opened(data: bytes, rate: int = 16_000, max_seconds: float = 30.0, **limits: float) -> np.ndarray:
    return open_audio(data, MediaLimits(**limits), rate=rate, max_seconds=max_seconds)  # type: ignore[arg-type]


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


def test_files_of_the_standard_library() -> None:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(np.array([[100, 300], [-32768, 0]], "<i2").tobytes())
    assert opened(buffer.getvalue()).tolist() == [200 / 32768, -0.5]


def test_channels_are_averaged() -> None:
    both = np.stack([HALF, -HALF, HALF], axis=1)
    np.testing.assert_allclose(opened(wav(both)), HALF / 3, atol=1e-4)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 44_101, 48_000, 96_000, 192_000, 15_999])
def test_resampling_preserves_a_tone(rate: int) -> None:
    def smooth(at: int) -> np.ndarray:
        times = np.arange(at) / at
        return (0.5 * np.sin(2 * np.pi * 1000 * times) * np.sin(np.pi * times) ** 2).astype(np.float32)

    made = resample(smooth(rate), rate, 16_000)
    assert len(made) == 16_000
    np.testing.assert_allclose(made, smooth(16_000), atol=1e-5)


def test_tones_above_the_band_are_removed_and_do_not_alias() -> None:
    times = np.arange(48_000) / 48_000
    high = (0.5 * np.sin(2 * np.pi * 11_000 * times)).astype(np.float32)
    assert np.abs(resample(high, 48_000, 16_000)[800:-800]).max() < 2e-4


def test_resampling_does_not_wrap_around() -> None:
    sudden = np.zeros(44_100, np.float32)
    sudden[-200:] = 1
    assert np.abs(resample(sudden, 44_100, 16_000)[:8_000]).max() < 1e-4


@given(
    count=st.integers(1, 3000),
    rate=st.one_of(st.integers(1_000, 192_000), st.sampled_from([8_000, 44_100, 48_000])),
)
def test_resampling_gives_the_right_length(count: int, rate: int) -> None:
    made = resample(np.ones(count, np.float32), rate, 16_000)
    assert len(made) == -(-count * 16_000 // rate)
    assert np.isfinite(made).all()


ABSURD = {
    "rate 0": (struct.pack("<HHIIHH", 1, 1, 0, 0, 2, 16), "0 samples per second; supported are 1000 to 192000"),
    "rate of gigahertz": (struct.pack("<HHIIHH", 1, 1, 2**32 - 1, 0, 2, 16), "4294967295 samples per second"),
    "no channels": (struct.pack("<HHIIHH", 1, 0, 16_000, 0, 0, 16), "0 channels"),
    "many channels": (struct.pack("<HHIIHH", 1, 65535, 16_000, 0, 0, 16), "65535 channels"),
    "blocks that do not fit": (struct.pack("<HHIIHH", 1, 2, 16_000, 0, 2, 16), "in blocks of 2 bytes"),
    "12 bits": (
        struct.pack("<HHIIHH", 1, 1, 16_000, 0, 2, 12),
        "samples of 12 bits in format 1; supported are PCM of 8, 16",
    ),
    "ADPCM": (struct.pack("<HHIIHH", 2, 1, 16_000, 0, 2, 4), "format ADPCM"),
    "MP3 in a WAV": (struct.pack("<HHIIHH", 85, 1, 16_000, 0, 1, 0), "format MP3"),
    "half floats": (struct.pack("<HHIIHH", 3, 1, 16_000, 0, 2, 16), "floats of 32 and 64 bits: convert it"),
    "a truncated format": (FORM[:10], "its fmt chunk is truncated"),
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_headers(name: str) -> None:
    form, words = ABSURD[name]
    with pytest.raises(MediaRefused) as refused:
        opened(riff(chunk(b"fmt ", form), chunk(b"data", bytes(64))))
    assert words in refused.value.message


DAMAGED = {
    "4 GB of samples": (
        riff(chunk(b"fmt ", FORM), chunk(b"data", bytes(8), 2**32 - 1)),
        "should have 4294967295 bytes but only 8",
    ),
    "truncated": (wav(HALF)[:-100], "only 15900 follow. The file is truncated"),
    "a chunk too long": (riff(chunk(b"fmt ", FORM), chunk(b"LIST", b"ab", 99)), "bytes but only 2 follow"),
    "no samples": (wav(HALF[:0]), "has no samples"),
    "no data": (riff(chunk(b"fmt ", FORM)), "it has no data chunk"),
    "no format": (riff(chunk(b"data", bytes(8))), "its data chunk comes before its fmt chunk"),
    "half a sample": (riff(chunk(b"fmt ", FORM), chunk(b"data", bytes(7))), "not a multiple of the block size 2"),
    "NaN": (wav(np.array([0.1, np.nan]), code=3, bits=32), "samples that are NaN or infinite"),
    "infinite": (wav(np.array([0.1, np.inf]), code=3, bits=64), "samples that are NaN or infinite"),
    "too large for a float": (wav(np.array([0.1, 1e300]), code=3, bits=64), "samples that are NaN or infinite"),
    "only a signature": (b"RIFF", "not audio in a supported format; send WAV"),
    "a text": (b"hello, this is no audio at all", "not audio in a supported format; send WAV"),
    "MP3 with a tag": (b"ID3\x04" + bytes(50), "this audio file is damaged"),
    "MP3": (b"\xff\xfb\x90\x00" + bytes(50), "audio"),
    "M4A": (b"\0\0\0\x20ftypM4A " + bytes(50), "this audio file is damaged"),
    "Ogg": (b"OggS" + bytes(50), "this audio file is damaged"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_and_other_formats(name: str) -> None:
    data, words = DAMAGED[name]
    with pytest.raises(MediaRefused) as refused:
        opened(data)
    assert words in refused.value.message


@given(st.binary(max_size=80), st.integers(0, 60))
def test_any_bytes_are_decoded_or_refused(noise: bytes, length: int) -> None:
    try:
        made = opened(wav(HALF[:10])[:length] + noise)
    except MediaRefused:
        return
    assert np.isfinite(made).all()


def test_audio_that_is_too_long() -> None:
    with pytest.raises(MediaRefused, match=r"2\.00 s long; this server takes at most 1 s \(--media-seconds\)"):
        opened(wav(tone(440, 2)), audio_seconds=1)
    with pytest.raises(MediaRefused, match=r"2\.00 s long; this model takes at most 1\.5 s per file. Split it"):
        opened(wav(tone(440, 2)), max_seconds=1.5)
    slow = struct.pack("<HHIIHH", 1, 1, 1_000, 1_000, 1, 8)
    with pytest.raises(MediaRefused, match=r"20000\.00 s long"):
        opened(riff(chunk(b"fmt ", slow), chunk(b"data", bytes(20_000_000))))


COMPRESSED = [
    ("mp3", "libmp3lame"),
    ("ogg", "libopus"),
    ("flac", "flac"),
    ("mp4", "aac"),
    ("adts", "aac"),
    ("webm", "libopus"),
]


def encoded_tone(kind: str, codec: str, seconds: float = 1.0, rate: int = 48_000) -> bytes:
    """A tone of 440 Hz in two channels."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout="stereo")
        samples = np.repeat(tone(440, seconds, rate)[np.newaxis], 2, axis=0)
        resampler = av.AudioResampler(format=stream.codec_context.format, layout="stereo", rate=rate)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout="stereo")
        frame.rate = rate
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode())
    return buffer.getvalue()


@pytest.mark.parametrize(("kind", "codec"), COMPRESSED)
def test_compressed_audio_is_decoded(kind: str, codec: str) -> None:
    made = opened(encoded_tone(kind, codec), timeout=60.0)
    assert made.dtype == np.float32 and 15_000 < len(made) < 18_500
    middle = made[4_000:12_000] * np.hanning(8_000)
    spectrum = np.abs(np.fft.rfft(middle))
    assert np.argmax(spectrum) * 2 == 440
    assert np.sum(spectrum[210:231] ** 2) > 0.99 * np.sum(spectrum**2)
    assert np.abs(middle).max() == pytest.approx(0.5, abs=0.05)


def test_compressed_audio_that_is_too_long() -> None:
    data = encoded_tone("mp3", "libmp3lame", seconds=5.0)
    with pytest.raises(MediaRefused, match=r"over 1\.5 s long; this model takes at most 1\.5 s"):
        opened(data, max_seconds=1.5, timeout=60.0)
    with pytest.raises(MediaRefused, match=r"over 1 s long; this server takes at most 1 s \(--media-seconds\)"):
        opened(data, audio_seconds=1, timeout=60.0)


def test_a_video_without_audio_and_an_unsupported_codec() -> None:
    with pytest.raises(MediaRefused, match="no audio stream"):
        opened(encode_video(pictures(3)), timeout=60.0)
    with pytest.raises(MediaRefused, match=r"codec adpcm_ima_qt is not supported. Send WAV, or one of these: mp3, aac"):
        opened(encoded_tone("mov", "adpcm_ima_qt"), timeout=60.0)


@settings(max_examples=15, deadline=None)
@given(cut=st.integers(20, 3_000), flips=st.lists(st.tuples(st.integers(0, 2_999), st.integers(1, 255)), max_size=6))
def test_damaged_compressed_audio_is_decoded_or_refused(cut: int, flips: list[tuple[int, int]]) -> None:
    data = bytearray(MP3[:cut])
    for index, bits in flips:
        if index < len(data):
            data[index] ^= bits
    try:
        made = opened(bytes(data), timeout=60.0)
    except MediaRefused:
        return
    assert np.isfinite(made).all()


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "av" else find(name, *rest))
    with pytest.raises(MediaRefused, match=r"millstream\[video\].* WAV needs no decoder: convert it with: ffmpeg"):
        opened(MP3)
    assert len(opened(wav(HALF))) == 8_000


MP3 = encoded_tone("mp3", "libmp3lame", seconds=0.3)
