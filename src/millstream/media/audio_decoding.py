"""Decodes compressed audio to samples with PyAV. Runs in the child process only: see `decoder`."""

from __future__ import annotations

from collections.abc import Iterator

import av
import numpy as np
import numpy.typing as npt

from millstream.errors import MediaRefused
from millstream.media.container import open_isolated

CODECS = ("mp3", "aac", "flac", "vorbis", "opus", "alac")


def decode(data: bytes, container: str, rate: int, seconds: float) -> npt.NDArray[np.float32]:
    """Mono, at `rate` samples per second. Decodes up to a second more than `seconds`, so that the caller can tell that
    the audio is longer. Raises `MediaRefused`."""
    return np.concatenate(list(pieces(data, container, rate, seconds)))


def pieces(data: bytes, container: str, rate: int, seconds: float) -> Iterator[npt.NDArray[np.float32]]:
    """Like `decode`, as it is decoded: at least one piece."""
    with open_isolated(data, container, "audio file") as file:
        if not file.streams.audio:
            raise MediaRefused("the audio file has no audio stream; send one that has")
        stream = file.streams.audio[0]
        codec = stream.codec_context.codec.canonical_name
        if codec not in CODECS:
            raise MediaRefused(
                f"the audio codec {codec} is not supported. Send WAV, or one of these: {', '.join(CODECS)}"
            )
        # Channels are averaged in `_mono`: FFmpeg's own downmix would make two equal channels louder.
        resampler = av.AudioResampler(format="fltp", layout=stream.codec_context.layout, rate=rate)
        remaining = most = int(seconds * rate) + rate
        for frame in file.decode(stream):
            for piece in resampler.resample(frame):
                mono = _mono(piece)
                remaining -= len(mono)
                yield mono
            if remaining <= 0:
                break
        for piece in resampler.resample(None):
            mono = _mono(piece)
            remaining -= len(mono)
            yield mono
    if remaining == most:
        raise MediaRefused("the audio file has no samples that can be decoded")


def _mono(frame: av.AudioFrame) -> npt.NDArray[np.float32]:
    mean: npt.NDArray[np.float32] = frame.to_ndarray().mean(axis=0, dtype=np.float32)
    return mean
