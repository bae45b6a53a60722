"""Audio to transcribe: any length in blocks, every format, and what is refused."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from dataclasses import replace

import av
import numpy as np
import pytest

from media.test_audio import COMPRESSED, encoded_tone
from millstream import sandbox
from millstream.errors import MediaRefused
from millstream.media import long_audio
from millstream.media.audio import open_audio
from millstream.media.decoder_stream import SampleStream, decode_samples
from millstream.media.limits import MediaLimits
from millstream.media.long_audio import likely_seconds, open_long_audio
from millstream.speech_types import Samples
from support.audio_files import tone, wav

LIMITS = MediaLimits(timeout=60.0, audio_seconds=14_400, seconds_option="--audio-seconds")


def opened(data: bytes, limits: MediaLimits = LIMITS) -> Samples:
    samples = open_long_audio(data, limits, limits.audio_seconds)
    assert samples is not None and samples.dtype == np.float32
    return samples


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 44_100, 44_101, 48_000, 192_000])
@pytest.mark.parametrize("channels", [1, 3])
def test_blocks_are_resampled_like_the_whole(rate: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_audio, "BLOCK_VALUES", rate * channels // 3)
    samples = tone(440, 3.21, rate) + tone(1900, 3.21, rate, volume=0.2)
    data = wav(np.stack([samples] * channels, axis=1), rate, bits=32, code=3)
    whole = open_audio(data, LIMITS, rate=16_000, max_seconds=60)
    made = opened(data)
    assert made.shape == whole.shape
    np.testing.assert_allclose(made, whole, atol=2e-4)
    assert np.abs(made - whole)[2_000:-2_000].mean() < 1e-5


@pytest.mark.parametrize(("kind", "codec"), COMPRESSED)
def test_compressed_formats(kind: str, codec: str) -> None:
    made = opened(encoded_tone(kind, codec))
    assert 15_000 < len(made) < 18_500
    spectrum = np.abs(np.fft.rfft(made[4_000:12_000] * np.hanning(8_000)))
    assert np.argmax(spectrum) * 2 == 440


def test_audio_longer_than_expected_is_told_apart_from_too_long() -> None:
    data = encoded_tone("mp3", "libmp3lame", seconds=5.0)
    assert open_long_audio(data, LIMITS, 2.0) is None
    assert open_long_audio(wav(tone(440, 5)), LIMITS, 2.0) is None
    assert open_long_audio(data, LIMITS, 0.0) is None
    short = MediaLimits(timeout=60.0, audio_seconds=2.0, seconds_option="--audio-seconds")
    for each in (data, wav(tone(440, 5))):
        with pytest.raises(MediaRefused, match=r"long; this server takes at most 2 s \(--audio-seconds\)"):
            open_long_audio(each, short, 2.0)


def test_a_silent_file_may_be_longer_than_its_size_lets_expect() -> None:
    """FLAC needs a few hundred bits per second for silence."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000 * 600), np.int16), format="s16", layout="mono")
        frame.rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    data = buffer.getvalue()
    expected = likely_seconds(data, LIMITS)
    assert expected < 600
    samples, seconds = decode_samples(data, SampleStream("flac", 16_000, expected), LIMITS)
    assert (len(samples), seconds) == (0, 600), "the file says it, so nothing was decoded"
    silent = data[:21] + bytes([data[21] & 0xF0, 0, 0, 0, 0]) + data[26:]  # a header that does not say it
    samples, seconds = decode_samples(silent, SampleStream("flac", 16_000, expected), LIMITS)
    assert expected < len(samples) / 16_000 == seconds < expected + 2, "decoding stopped there"
    for each in (data, silent):
        assert open_long_audio(each, LIMITS, expected) is None
        assert len(opened(each)) == 16_000 * 600
    with pytest.raises(MediaRefused, match=r"over 300\.00 s long; this server takes at most 300 s"):
        open_long_audio(data, replace(LIMITS, audio_seconds=300.0), 300.0)


DAMAGED = {
    "empty": (b"", "not audio in a supported format"),
    "a text": (b"this is no audio", "not audio in a supported format"),
    "a truncated WAV": (wav(tone(440, 1))[:-1000], "The file is truncated"),
    "a WAV without samples": (wav(tone(440, 0)), "has no samples"),
    "NaN": (wav(np.array([0.1, np.nan]), code=3, bits=32), "NaN or infinite"),
    "Ogg": (b"OggS" + bytes(500), "this audio file is damaged"),
    "a truncated MP4": (encoded_tone("mp4", "aac")[:800], "this audio file is damaged"),
    "MP3 of zeros": (b"ID3\x04" + bytes(500), "damaged"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name: str) -> None:
    data, words = DAMAGED[name]
    with pytest.raises(MediaRefused) as refused:
        opened(data)
    assert words in refused.value.message


def test_a_decoder_that_hangs_or_crashes_costs_its_file_only(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded_tone("mp3", "libmp3lame")
    fast = MediaLimits(timeout=0.5, audio_seconds=60)
    for code, words in {
        "import time; time.sleep(60)": "took longer than 0.5 s (--media-timeout)",
        "import os; os.kill(os.getpid(), 11)": "the decoder was killed by SIGSEGV. Re-encode it as WAV or MP3",
        "raise MemoryError('too much')": "the decoder failed (MemoryError: too much)",
        "print('half of it')": "the decoder failed",
    }.items():
        limits = fast if "sleep" in code else LIMITS
        monkeypatch.setattr(sandbox, "command", lambda *_, code=code: [sys.executable, "-c", code])
        with pytest.raises(MediaRefused) as refused:
            opened(data, limits)
        assert words in refused.value.message


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    data = encoded_tone("mp3", "libmp3lame", seconds=0.3)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "av" else find(name, *rest))
    with pytest.raises(MediaRefused, match=r"millstream\[audio\].* WAV needs no decoder: convert it with: ffmpeg"):
        opened(data)
    assert len(opened(wav(tone(440, 0.5)))) == 8_000


def test_neither_pillow_nor_pyav_is_imported() -> None:
    code = "import sys, millstream.media.long_audio; assert not {'PIL', 'av'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
