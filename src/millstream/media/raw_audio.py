"""Raw audio of realtime sessions: 16-bit PCM and G.711, to samples and back."""

from __future__ import annotations

from typing import Literal

import numpy as np

from millstream.media.resampling import Resampler
from millstream.speech_types import Samples

RawEncoding = Literal["pcm16", "g711_ulaw", "g711_alaw"]

_BIAS = 132
"""Of µ-law."""


def _ulaw_table() -> Samples:
    codes = ~np.arange(256, dtype=np.uint8)
    exponent, mantissa = (codes >> 4 & 7).astype(np.int32), (codes & 15).astype(np.int32)
    magnitude = ((mantissa << 3) + _BIAS << exponent) - _BIAS
    return (np.where(codes & 128, -magnitude, magnitude) / 32768).astype(np.float32)


def _alaw_table() -> Samples:
    codes = np.arange(256, dtype=np.uint8) ^ 0x55
    exponent, mantissa = (codes >> 4 & 7).astype(np.int32), (codes & 15).astype(np.int32)
    magnitude = np.where(exponent == 0, (mantissa << 4) + 8, (mantissa << 4) + 264 << np.maximum(exponent - 1, 0))
    return (np.where(codes & 128, magnitude, -magnitude) / 32768).astype(np.float32)


_TABLES = {"g711_ulaw": _ulaw_table(), "g711_alaw": _alaw_table()}
_SORTED = {name: np.argsort(table, kind="stable") for name, table in _TABLES.items()}


class RawDecoder:
    """From the bytes of one stream to samples at `target_rate`. A sample may be split between two pieces."""

    def __init__(self, encoding: RawEncoding, rate: int, target_rate: int) -> None:
        self._encoding = encoding
        self._resampler = None if rate == target_rate else Resampler(rate, target_rate)
        self._rest = b""

    def feed(self, data: bytes) -> Samples:
        samples = self._decode(data)
        return samples if self._resampler is None else self._resampler.push(samples)

    def flush(self) -> Samples:
        """The last samples, once no more audio comes."""
        return np.zeros(0, np.float32) if self._resampler is None else self._resampler.finish()

    def _decode(self, data: bytes) -> Samples:
        if self._encoding != "pcm16":
            return _TABLES[self._encoding][np.frombuffer(data, np.uint8)]
        data = self._rest + data
        whole = len(data) & ~1
        self._rest = data[whole:]
        return np.frombuffer(data[:whole], "<i2").astype(np.float32) / np.float32(32768)


class RawEncoder:
    """From samples at `rate` to the bytes of one stream. What is too loud is clipped."""

    def __init__(self, rate: int, encoding: RawEncoding, target_rate: int) -> None:
        self._encoding = encoding
        self._resampler = None if rate == target_rate else Resampler(rate, target_rate)

    def feed(self, samples: Samples) -> bytes:
        return self._encode(samples if self._resampler is None else self._resampler.push(samples))

    def flush(self) -> bytes:
        return b"" if self._resampler is None else self._encode(self._resampler.finish())

    def _encode(self, samples: Samples) -> bytes:
        samples = np.clip(np.nan_to_num(samples), -1, 1)
        if self._encoding == "pcm16":
            return np.rint(samples * 32767).astype("<i2").tobytes()
        table, order = _TABLES[self._encoding], _SORTED[self._encoding]
        levels = table[order]
        above = np.searchsorted(levels, samples).clip(1, len(levels) - 1)
        nearest = above - (samples - levels[above - 1] < levels[above] - samples)
        return bytes(order[nearest].astype(np.uint8))


def bytes_per_second(encoding: RawEncoding, rate: int) -> int:
    return rate * (2 if encoding == "pcm16" else 1)
