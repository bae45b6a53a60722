"""Opens a video as frames. Pillow reads animated pictures; nothing here decodes MP4 and its like."""

from __future__ import annotations

import io
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from PIL import Image, ImageSequence

from millstream.errors import MediaRefused
from millstream.media.images import as_rgb, check_size, decoding
from millstream.media.limits import MediaLimits

FORMATS = ("GIF", "WEBP", "PNG")
WANTED = "videos are read as animated GIF, WEBP or PNG"
WORK = 2
"""All frames together may have so many times the pixels of one image: each is decoded, and kept until it is known
which are wanted."""
A_SECOND, FEWEST, MOST = 2.0, 4, 64
"""Frames that are looked at."""
USUAL = 100
"""Milliseconds of a frame that does not say."""


@dataclass(frozen=True, slots=True)
class Frames:
    images: list[Image.Image]
    seconds: list[float]
    """When each is shown."""


def open_frames(data: bytes, limits: MediaLimits) -> Frames:
    """Raises `MediaRefused`."""
    with decoding("video", WANTED):
        film = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(film, limits)
        most = WORK * limits.pixels // (film.width * film.height)
        images, spans = [], []
        for number, frame in enumerate(ImageSequence.Iterator(film)):
            if number == most:
                raise MediaRefused(
                    f"a video has more than {most} frames of {film.width} x {film.height}, which is {WORK} times the "
                    "pixels of the largest image (--media-pixels). Send a shorter or smaller one"
                )
            images.append(as_rgb(frame.copy()))
            spans.append(float(frame.info.get("duration") or USUAL) / 1000)
    ends = list(accumulate(spans))
    wanted = chosen(ends)
    return Frames([images[number] for number in wanted], [ends[number] - spans[number] for number in wanted])


def chosen(ends: list[float]) -> list[int]:
    """Which frames to look at, from when each of them ends: at even times, each at most once."""
    count = min(len(ends), MOST, max(FEWEST, round(ends[-1] * A_SECOND)))
    times = [ends[-1] * number / count for number in range(count)]
    return sorted({bisect_right(ends, time + 1e-9) for time in times})
