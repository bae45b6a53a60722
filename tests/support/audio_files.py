"""Audio samples and WAV files for tests."""

from __future__ import annotations

import base64
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def tone(hertz: float, seconds: float, rate: int = 16_000, volume: float = 0.5) -> Array:
    """A tone with some noise, so that no two seconds are the same."""
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(round(hertz)).normal(size=len(times)) * 0.01
    return (volume * np.sin(2 * np.pi * hertz * times) + noise).astype(np.float32)


def wav(samples: Array, rate: int = 16_000, *, bits: int = 16, code: int = 1, extensible: bool = False) -> bytes:
    """`samples`: from -1 to 1, (frames,) or (frames, channels)."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    body = _encoded(samples, bits, code)
    align = channels * bits // 8
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else code, channels, rate, rate * align, align, bits)
    if extensible:
        form += struct.pack("<HHIH", 22, bits, 0, code) + bytes.fromhex("000000001000800000aa00389b71")
    return riff(chunk(b"fmt ", form), chunk(b"LIST", b"odd"), chunk(b"data", body))


def riff(*chunks: bytes) -> bytes:
    inner = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(inner)) + inner


def chunk(name: bytes, body: bytes, size: int | None = None) -> bytes:
    """`size`: a wrong length to write into the header."""
    return struct.pack("<4sI", name, len(body) if size is None else size) + body + b"\0" * (len(body) % 2)


def _encoded(samples: Array, bits: int, code: int) -> bytes:
    if code == 3:
        return samples.astype(f"<f{bits // 8}").tobytes()
    if bits == 8:
        return np.round(samples * 127 + 128).astype(np.uint8).tobytes()
    integers = np.round(samples.astype(np.float64) * (2 ** (bits - 1) - 1)).astype("<i4")
    if bits == 24:
        return integers.reshape(-1, 1).view(np.uint8)[:, :3].tobytes()
    return integers.astype(f"<i{bits // 8}").tobytes()


def audio_part(data: bytes, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}
