"""Video files for tests, encoded with PyAV: the colour of a frame encodes its number."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
from PIL import Image

LOSSLESS = {"codec": "libx264rgb", "pixels": "rgb24", "qp": "0"}
"""Decoded pixels equal the encoded ones."""


def colour(number: int) -> tuple[int, int, int]:
    return (number % 16 * 16, number // 16 % 16 * 16, 128)


def pictures(count: int, size: tuple[int, int] = (32, 24)) -> list[Image.Image]:
    return [Image.new("RGB", size, colour(number)) for number in range(count)]


def encode_video(
    images: Sequence[Image.Image],
    kind: str = "mp4",
    *,
    codec: str = "libx264",
    rate: int = 10,
    times: Sequence[int] | None = None,
    pixels: str = "yuv420p",
    title: str = "",
    **options: str,
) -> bytes:
    """`times`: when each frame is shown, in milliseconds; by default `rate` frames per second."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        if title:
            container.metadata["title"] = title
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height = images[0].size
        stream.pix_fmt = pixels
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, image in enumerate(images):
            frame = av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24")
            milliseconds = number * 1000 // rate if times is None else times[number]
            frame.pts, frame.time_base = milliseconds, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def audio_only(kind: str = "mp4") -> bytes:
    """A file of this container with an audio stream only."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def animated(images: Sequence[Image.Image], rate: int = 10) -> bytes:
    """The frames as an animated PNG."""
    buffer = io.BytesIO()
    images[0].save(buffer, "PNG", save_all=True, append_images=list(images[1:]), duration=1000 // rate, loop=0)
    return buffer.getvalue()
