"""Encodes speech for clients, piece by piece while it is made: WAV and raw PCM here, other formats with PyAV.

Only samples that a model of this server made are encoded here, so FFmpeg need not run in a sandbox: nothing that a
stranger wrote is parsed. Encoders block for milliseconds: call them on worker threads.
"""

from __future__ import annotations

import importlib.util
from typing import Literal, Protocol, get_args

from millstream.errors import BadRequest
from millstream.installed import install_command
from millstream.media.pcm import to_pcm16, wav_header
from millstream.media.resampling import Resampler
from millstream.speech_types import Samples

AudioFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
FORMATS: tuple[AudioFormat, ...] = get_args(AudioFormat)
PLAIN: tuple[AudioFormat, ...] = ("wav", "pcm")
"""Formats that need no extra."""
MEDIA_TYPES: dict[AudioFormat, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
PCM_RATE = 24_000
"""Samples per second of `pcm`, which has no header to say it: what OpenAI's clients expect."""


class AudioUnavailable(BadRequest):
    """An audio format needs a package that is not installed (400)."""

    code = "audio_format_unavailable"
    quotes_input = False


class AudioEncoder(Protocol):
    """Makes one file. Its calls must not overlap, but each may come from another thread."""

    def encode(self, samples: Samples) -> bytes:
        """The bytes that can be given now; there may be none."""
        ...

    def finish(self) -> bytes:
        """The rest. Call it once."""
        ...

    def close(self) -> None:
        """Frees its threads and memory, whether or not it was finished. Safe to call twice."""
        ...


def require_format(form: AudioFormat) -> None:
    """Raises `AudioUnavailable` if the format needs an extra that is not installed."""
    if form not in PLAIN and importlib.util.find_spec("av") is None:
        raise AudioUnavailable(
            f"response_format {form} needs PyAV, which is not installed on this server. Run there: "
            f"{install_command('millstream[audio]')}. Or ask for wav or pcm.",
            param="response_format",
        )


def open_encoder(form: AudioFormat, rate: int, *, whole: bool = False) -> AudioEncoder:
    """`rate`: of the samples. `whole`: gives nothing before the end, and then a file whose header knows its length.
    Raises `AudioUnavailable`."""
    require_format(form)
    if form == "pcm":
        return _Pcm(rate)
    if form == "wav":
        return _WholeWav(rate) if whole else _StreamedWav(rate)
    from millstream.media.compressed_encoding import CompressedEncoder  # PyAV: an extra, and slow to import

    return CompressedEncoder(form, rate, whole=whole)


class _Pcm:
    """Raw samples at `PCM_RATE`."""

    def __init__(self, rate: int) -> None:
        self._resampler = None if rate == PCM_RATE else Resampler(rate, PCM_RATE)

    def encode(self, samples: Samples) -> bytes:
        return to_pcm16(samples if self._resampler is None else self._resampler.push(samples))

    def finish(self) -> bytes:
        return b"" if self._resampler is None else to_pcm16(self._resampler.finish())

    def close(self) -> None:
        """It holds nothing."""


class _StreamedWav:
    """At the model's own rate. Its header does not know how much follows."""

    def __init__(self, rate: int) -> None:
        self._header = wav_header(rate, None)

    def encode(self, samples: Samples) -> bytes:
        header, self._header = self._header, b""
        return header + to_pcm16(samples)

    def finish(self) -> bytes:
        return self._header

    def close(self) -> None:
        """It holds nothing."""


class _WholeWav:
    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._pieces: list[bytes] = []

    def encode(self, samples: Samples) -> bytes:
        self._pieces.append(to_pcm16(samples))
        return b""

    def finish(self) -> bytes:
        body = b"".join(self._pieces)
        return wav_header(self._rate, len(body)) + body

    def close(self) -> None:
        self._pieces = []
