"""Parses WAV files: PCM and float samples of every common width.

The standard library's `wave` does not support floats. Every field of the header is checked before it is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from millstream.errors import MediaRefused
from millstream.media.pcm import UNKNOWN_LENGTH

Samples = npt.NDArray[np.float32]

CONVERT_HINT = "convert it with: ffmpeg -i audio -ar 16000 -ac 1 -c:a pcm_s16le audio.wav"
NOT_FINITE = "the audio has samples that are NaN or infinite; export it again"
MAX_CHANNELS = 8
MIN_RATE, MAX_RATE = 1_000, 192_000
"""Samples per second."""
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_BITS = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}
_FORMAT_NAMES = {2: "ADPCM", 6: "A-law", 7: "mu-law", 17: "ADPCM", 49: "GSM", 80: "MPEG", 85: "MP3"}


@dataclass(frozen=True, slots=True)
class Wav:
    """A file whose header has been checked; its samples are not decoded yet."""

    code: int
    bits: int
    channels: int
    rate: int
    body: memoryview

    @property
    def seconds(self) -> float:
        return len(self.body) * 8 / self.bits / self.channels / self.rate

    @property
    def frames(self) -> int:
        return len(self.body) * 8 // self.bits // self.channels

    def part(self, first: int, last: int) -> Wav:
        """The frames from `first` to before `last`, as far as there are such."""
        width = self.bits // 8 * self.channels
        return replace(self, body=self.body[max(first, 0) * width : last * width])

    def mono(self) -> Samples:
        """The mean of the channels, from -1 to 1. Raises `MediaRefused` if a sample is NaN or infinite."""
        with np.errstate(over="ignore"):
            flat = self._decoded().astype(np.float32)
        if not np.isfinite(flat).all():
            raise MediaRefused(NOT_FINITE)
        return flat if self.channels == 1 else flat.reshape(-1, self.channels).mean(axis=1, dtype=np.float32)

    def _decoded(self) -> npt.NDArray[np.floating]:
        if self.code == _FLOAT:
            return np.frombuffer(self.body, f"<f{self.bits // 8}")
        if self.bits == 8:  # the only unsigned width
            return (np.frombuffer(self.body, np.uint8).astype(np.float32) - 128) / 128
        if self.bits == 24:
            padded = np.zeros((len(self.body) // 3, 4), np.uint8)
            padded[:, 1:] = np.frombuffer(self.body, np.uint8).reshape(-1, 3)
            return padded.view("<i4")[:, 0] / 2.0**31
        return np.frombuffer(self.body, f"<i{self.bits // 8}") / 2.0 ** (self.bits - 1)


def open_wav(data: bytes) -> Wav:
    """Raises `MediaRefused`."""
    if len(data) < 12 or data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise MediaRefused(f"the file is not audio in a supported format; send WAV. For other formats, {CONVERT_HINT}")
    form: tuple[int, int, int, int] | None = None
    streamed = data[4:8] == b"\xff\xff\xff\xff"  # as our own speech: the header was sent before the length was known
    at = 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        at += 8
        if name == b"data" and size == UNKNOWN_LENGTH and streamed:
            size = len(data) - at
        if size > len(data) - at:
            raise MediaRefused(
                f"the WAV file is damaged: a chunk should have {size} bytes but only {len(data) - at} follow. The file "
                "is truncated or was written to a pipe; save it to a file again"
            )
        if name == b"fmt ":
            form = _parse_format(data[at : at + size])
        elif name == b"data":
            return _checked(form, memoryview(data)[at : at + size])
        at += size + size % 2
    raise MediaRefused("the WAV file is damaged: it has no data chunk; save it again")


def _parse_format(head: bytes) -> tuple[int, int, int, int]:
    """Format code, bits per sample, channels and rate."""
    if len(head) < 16:
        raise MediaRefused("the WAV file is damaged: its fmt chunk is truncated; save it again")
    code, channels, rate, _, align, bits = struct.unpack_from("<HHIIHH", head)
    if code == _EXTENSIBLE and len(head) >= 26:
        (code,) = struct.unpack_from("<H", head, 24)
    if bits not in _BITS.get(code, ()):
        raise MediaRefused(
            f"the WAV file has samples of {bits} bits in format {_FORMAT_NAMES.get(code, code)}; supported are PCM of "
            f"8, 16, 24 and 32 bits and floats of 32 and 64 bits: {CONVERT_HINT}"
        )
    if not 1 <= channels <= MAX_CHANNELS or align != channels * bits // 8:
        raise MediaRefused(
            f"the WAV file declares {channels} channels in blocks of {align} bytes; supported are 1 to {MAX_CHANNELS} "
            f"channels of {bits // 8} bytes each"
        )
    if not MIN_RATE <= rate <= MAX_RATE:
        raise MediaRefused(f"the WAV file declares {rate} samples per second; supported are {MIN_RATE} to {MAX_RATE}")
    return code, bits, channels, rate


def _checked(form: tuple[int, int, int, int] | None, body: memoryview) -> Wav:
    if form is None:
        raise MediaRefused("the WAV file is damaged: its data chunk comes before its fmt chunk; save it again")
    code, bits, channels, rate = form
    block = bits // 8 * channels
    if not len(body):
        raise MediaRefused("the WAV file has no samples")
    if len(body) % block:
        raise MediaRefused(
            f"the WAV file is damaged: {len(body)} bytes of samples are not a multiple of the block size {block}; save "
            "it again"
        )
    return Wav(code, bits, channels, rate, body)
