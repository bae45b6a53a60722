"""From a coded sound to samples, with PyAV. Runs in a child process: see `decoder`."""

from __future__ import annotations

import av
import numpy as np
import numpy.typing as npt

from millstream.errors import MediaRefused
from millstream.media.container import open_closed

CODECS = ("mp3", "aac", "flac", "vorbis", "opus", "alac")


def decode(data: bytes, container: str, rate: int, seconds: float) -> npt.NDArray[np.float32]:
    """One channel, `rate` samples a second, of the first `seconds` and a little more, so that a longer one can be
    told. Raises `MediaRefused`."""
    with open_closed(data, container, "sound") as file:
        if not file.streams.audio:
            raise MediaRefused("a file of sound has no stream of sound; send one that does")
        stream = file.streams.audio[0]
        name = stream.codec_context.codec.canonical_name
        if name not in CODECS:
            raise MediaRefused(f"a sound is coded as {name}; this server reads WAV and {', '.join(CODECS)}")
        # The channels are not mixed by FFmpeg, which would make two equal ones louder.
        resampler = av.AudioResampler(format="fltp", layout=stream.codec_context.layout, rate=rate)
        pieces: list[npt.NDArray[np.float32]] = []
        left = int(seconds * rate) + rate
        for frame in file.decode(stream):
            for piece in resampler.resample(frame):
                pieces.append(_mono(piece))
                left -= len(pieces[-1])
            if left <= 0:
                break
        pieces += [_mono(piece) for piece in resampler.resample(None)]
    if not pieces:
        raise MediaRefused("a sound has nothing that can be decoded")
    return np.concatenate(pieces)


def _mono(frame: av.AudioFrame) -> npt.NDArray[np.float32]:
    mean: npt.NDArray[np.float32] = frame.to_ndarray().mean(axis=0, dtype=np.float32)
    return mean
