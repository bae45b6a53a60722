"""Decodes compressed audio to samples with PyAV. Runs in the child process only: see `decoder`."""

from __future__ import annotations

from collections.abc import Iterator

import av
import numpy as np
import numpy.typing as npt

from millstream.errors import MediaRefused
from millstream.media.container import open_isolated

EXACT = ("flac", "ogg", "mov", "matroska")
"""Containers whose files say how long they are. Of others FFmpeg guesses it from the bit rate."""
CODECS = ("mp3", "aac", "flac", "vorbis", "opus", "alac")


class LongerAudio(Exception):
    """The file says that it is longer than what is wanted of it: this many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


def decode(data: bytes, container: str, rate: int, seconds: float) -> npt.NDArray[np.float32]:
    """Mono, at `rate` samples per second. Decodes up to a second more than `seconds`, so that the caller can tell that
    the audio is longer. Raises `MediaRefused`."""
    return np.concatenate(list(pieces(data, container, rate, seconds)))


def pieces(
    data: bytes, container: str, rate: int, seconds: float, *, whole: bool = False
) -> Iterator[npt.NDArray[np.float32]]:
    """Like `decode`, as it is decoded: at least one piece. With `whole`, raises `LongerAudio` before anything is
    decoded if the file says so: silence takes few bytes and many samples."""
    with open_isolated(data, container, "audio file") as file:
        if not file.streams.audio:
            raise MediaRefused("the audio file has no audio stream; send one that has")
        stream = file.streams.audio[0]
        codec = stream.codec_context.codec.canonical_name
        if codec not in CODECS:
            raise MediaRefused(
                f"the audio codec {codec} is not supported. Send WAV, or one of these: {', '.join(CODECS)}"
            )
        declared = _declared_seconds(stream) if container in EXACT else 0.0
        if whole and declared > seconds + 1:
            raise LongerAudio(declared)
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


def _declared_seconds(stream: av.AudioStream) -> float:
    """0 if the file does not say."""
    return 0.0 if stream.duration is None or stream.time_base is None else float(stream.duration * stream.time_base)


def _mono(frame: av.AudioFrame) -> npt.NDArray[np.float32]:
    mean: npt.NDArray[np.float32] = frame.to_ndarray().mean(axis=0, dtype=np.float32)
    return mean
