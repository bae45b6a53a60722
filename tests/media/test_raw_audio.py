"""Raw audio of realtime sessions: tables of G.711, pieces of any size, rates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.media.raw_audio import RawDecoder, RawEncoder, bytes_per_second

FORMATS = [("pcm16", 24_000), ("pcm16", 16_000), ("pcm16", 48_000), ("g711_ulaw", 8_000), ("g711_alaw", 8_000)]


def tone(rate: int, seconds: float = 0.5, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def test_values_of_g711() -> None:
    """Some values of the standard's tables, as 16-bit integers."""
    ulaw = RawDecoder("g711_ulaw", 8_000, 8_000).feed(bytes([0x00, 0x80, 0x7F, 0xFF, 0x10, 0xAA]))
    assert (ulaw * 32768).tolist() == [-32124, 32124, 0, 0, -15996, 5372]
    alaw = RawDecoder("g711_alaw", 8_000, 8_000).feed(bytes([0x00, 0x80, 0x55, 0xD5, 0x2A, 0xAA]))
    assert (alaw * 32768).tolist() == [-5504, 5504, -8, 8, -32256, 32256]


@pytest.mark.parametrize(("encoding", "rate"), FORMATS)
def test_there_and_back(encoding, rate) -> None:
    sound = tone(24_000)
    encoder = RawEncoder(24_000, encoding, rate)
    data = encoder.feed(sound) + encoder.flush()
    assert len(data) == bytes_per_second(encoding, rate) // 2
    decoder = RawDecoder(encoding, rate, 24_000)
    back = np.concatenate([decoder.feed(data), decoder.flush()])
    assert len(back) == len(sound)
    middle = slice(1_000, -1_000)
    assert np.abs(back[middle] - sound[middle]).max() < (0.002 if encoding == "pcm16" else 0.03)


@given(st.lists(st.integers(0, 400), max_size=20), st.sampled_from(FORMATS))
def test_pieces_of_any_size_give_the_same(sizes: list[int], form: tuple[str, int]) -> None:
    encoding, rate = form
    data = np.random.default_rng(1).integers(0, 256, sum(sizes), np.uint8).tobytes()
    whole = RawDecoder(encoding, rate, 16_000)  # type: ignore[arg-type]
    pieces = RawDecoder(encoding, rate, 16_000)  # type: ignore[arg-type]
    found, at = [], 0
    for size in sizes:
        found.append(pieces.feed(data[at : at + size]))
        at += size
    expected = np.concatenate([whole.feed(data), whole.flush()])
    np.testing.assert_allclose(np.concatenate([*found, pieces.flush()]), expected, atol=1e-6)


def test_what_is_too_loud_is_clipped() -> None:
    loud = np.array([2.0, -2.0, np.nan, np.inf], np.float32)
    assert np.frombuffer(RawEncoder(8_000, "pcm16", 8_000).feed(loud), "<i2").tolist() == [32767, -32767, 0, 32767]
