"""Encodes audio as MP3, Ogg Opus, FLAC and AAC with PyAV (the extra `audio`). Only `audio_encoding` imports this."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import av
import numpy as np

from millstream.media.pcm import to_pcm16
from millstream.media.resampling import Resampler
from millstream.speech_types import Samples


@dataclass(frozen=True, slots=True)
class _Codec:
    container: str
    """FFmpeg's name of the muxer."""
    name: str
    """FFmpeg's name of the encoder."""
    bit_rate: int | None = None
    """For one channel of speech. None: lossless."""
    options: dict[str, str] = field(default_factory=dict)
    """Of the muxer."""
    streamed: dict[str, str] = field(default_factory=dict)
    """Of the muxer, if nothing can be written into the header at the end."""


_CODECS = {
    # The frame with the length comes first, so a stream cannot have it.
    "mp3": _Codec("mp3", "libmp3lame", 96_000, streamed={"write_xing": "0"}),
    # Without it, an Ogg page holds back a second of audio.
    "opus": _Codec("ogg", "libopus", 48_000, {"page_duration": "200000"}),
    "flac": _Codec("flac", "flac"),
    "aac": _Codec("adts", "aac", 96_000),
}


class CompressedEncoder:
    """Implements `audio_encoding.AudioEncoder`."""

    def __init__(self, form: str, rate: int, *, whole: bool) -> None:
        codec = _CODECS[form]
        self._output: _Pipe | io.BytesIO = io.BytesIO() if whole else _Pipe()
        options = codec.options if whole else codec.options | codec.streamed
        self._container = av.open(self._output, "w", codec.container, options=options)
        self._rate = _nearest(rate, av.codec.Codec(codec.name, "w").audio_rates)
        self._resampler = None if self._rate == rate else Resampler(rate, self._rate)
        stream = self._container.add_stream(codec.name, rate=self._rate, layout="mono")
        assert isinstance(stream, av.AudioStream)
        self._stream = stream
        if codec.bit_rate is not None:
            self._stream.bit_rate = codec.bit_rate
        self._container.start_encoding()
        self._position = 0

    def encode(self, samples: Samples) -> bytes:
        self._write(samples if self._resampler is None else self._resampler.push(samples))
        return self._given()

    def finish(self) -> bytes:
        if self._resampler is not None:
            self._write(self._resampler.finish())
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._output.getvalue() if isinstance(self._output, io.BytesIO) else self._output.take()

    def close(self) -> None:
        """An encoder has threads of its own. Left to the garbage collector, they stay until it finds the cycle."""
        self._container.close()

    def _write(self, samples: Samples) -> None:
        if not len(samples):
            return
        pcm = np.frombuffer(to_pcm16(samples), "<i2").astype(np.int16, copy=False)
        frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._position
        self._position += len(samples)
        self._container.mux(self._stream.encode(frame))

    def _given(self) -> bytes:
        return self._output.take() if isinstance(self._output, _Pipe) else b""


class _Pipe:
    """A file that cannot be sought: its bytes are taken as they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def write(self, data: bytes) -> int:
        self._bytes += data
        return len(data)

    def take(self) -> bytes:
        taken = bytes(self._bytes)
        self._bytes.clear()
        return taken


def _nearest(rate: int, rates: list[int] | None) -> int:
    """The codec's lowest rate that loses nothing, or else its highest. None: it takes any."""
    if rates is None or rate in rates:
        return rate
    return min((each for each in rates if each > rate), default=max(rates))
