"""Reads WAV files: whole numbers and floats, of any width that is in use. The standard library's reader knows no
floats. Nothing here trusts a header."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millstream.errors import MediaRefused

Samples = npt.NDArray[np.float32]

HOW = "convert it with: ffmpeg -i sound -ar 16000 -ac 1 -c:a pcm_s16le sound.wav"
CHANNELS = 8
SLOWEST, FASTEST = 1_000, 192_000
"""Samples a second."""
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_WIDTHS = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}
_NAMES = {2: "ADPCM", 6: "A-law", 7: "mu-law", 17: "ADPCM", 49: "GSM", 80: "MPEG", 85: "MP3"}


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

    def mono(self) -> Samples:
        """The mean of the channels, from -1 to 1. Raises `MediaRefused` for what is no number."""
        with np.errstate(over="ignore"):
            flat = self._decoded().astype(np.float32)
        if not np.isfinite(flat).all():
            raise MediaRefused("a sound has samples that are no numbers (NaN or infinite); write it again")
        return flat if self.channels == 1 else flat.reshape(-1, self.channels).mean(axis=1, dtype=np.float32)

    def _decoded(self) -> npt.NDArray[np.floating]:
        if self.code == _FLOAT:
            return np.frombuffer(self.body, f"<f{self.bits // 8}")
        if self.bits == 8:  # the only width without a sign
            return (np.frombuffer(self.body, np.uint8).astype(np.float32) - 128) / 128
        if self.bits == 24:
            wide = np.zeros((len(self.body) // 3, 4), np.uint8)
            wide[:, 1:] = np.frombuffer(self.body, np.uint8).reshape(-1, 3)
            return wide.view("<i4")[:, 0] / 2.0**31
        return np.frombuffer(self.body, f"<i{self.bits // 8}") / 2.0 ** (self.bits - 1)


def open_wav(data: bytes) -> Wav:
    """Raises `MediaRefused`."""
    if len(data) < 12 or data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise MediaRefused(f"a file is no sound that can be read: WAV is. For other formats, {HOW}")
    form: tuple[int, int, int, int] | None = None
    at = 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        at += 8
        if size > len(data) - at:
            raise MediaRefused(
                f"a WAV file is damaged: its header speaks of {size} bytes where {len(data) - at} follow. It was cut "
                "off, or written into a pipe; save it to a file again"
            )
        if name == b"fmt ":
            form = _format(data[at : at + size])
        elif name == b"data":
            return _checked(form, memoryview(data)[at : at + size])
        at += size + size % 2
    raise MediaRefused("a WAV file is damaged: it has no samples; save it again")


def _format(head: bytes) -> tuple[int, int, int, int]:
    """Code, bits, channels and rate."""
    if len(head) < 16:
        raise MediaRefused("a WAV file is damaged: its format is cut off; save it again")
    code, channels, rate, _, align, bits = struct.unpack_from("<HHIIHH", head)
    if code == _EXTENSIBLE and len(head) >= 26:
        (code,) = struct.unpack_from("<H", head, 24)
    if bits not in _WIDTHS.get(code, ()):
        raise MediaRefused(
            f"a WAV file has samples of {bits} bits in format {_NAMES.get(code, code)}; PCM of 8, 16, 24 and 32 bits "
            f"and floats of 32 and 64 are read: {HOW}"
        )
    if not 1 <= channels <= CHANNELS or align != channels * bits // 8:
        raise MediaRefused(
            f"a WAV file says that it has {channels} channels in blocks of {align} bytes; 1 to {CHANNELS} channels are "
            f"read, of {bits // 8} bytes each"
        )
    if not SLOWEST <= rate <= FASTEST:
        raise MediaRefused(f"a WAV file says that it has {rate} samples a second; {SLOWEST} to {FASTEST} are read")
    return code, bits, channels, rate


def _checked(form: tuple[int, int, int, int] | None, body: memoryview) -> Wav:
    if form is None:
        raise MediaRefused("a WAV file is damaged: it has samples before their format; save it again")
    code, bits, channels, rate = form
    block = bits // 8 * channels
    if not len(body):
        raise MediaRefused("a WAV file has no samples")
    if len(body) % block:
        raise MediaRefused(
            f"a WAV file is damaged: {len(body)} bytes of samples are not whole blocks of {block}; save it again"
        )
    return Wav(code, bits, channels, rate, body)
