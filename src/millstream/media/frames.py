"""Opens a video as frames: Pillow reads animated pictures here, a child process decodes files of video."""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import accumulate

from PIL import Image, ImageSequence

from millstream.errors import MediaRefused
from millstream.media.frame_sampling import FrameSampling, chosen
from millstream.media.images import as_rgb, check_size, decoding, pixel_bytes
from millstream.media.limits import MediaLimits
from millstream.media.video_file import container_of, decode_video

FORMATS = ("GIF", "WEBP", "PNG")
WANTED = "videos are read as MP4, MOV, WebM or Matroska, and as animated GIF, WEBP or PNG"
WORK = 2
"""All frames of an animated picture together may have so many times the pixels of one image: each is decoded, and kept
until it is known which are wanted."""
MOST = 5_000
"""Frames of an animated picture. A file of 20 MB can hold a million of one pixel each."""
VIDEO_PIXEL_BYTES = 10
"""Of the pixels that all frames of a video may have together: three as the child sends them, four as an image, and a
share for the child."""
USUAL = 100
"""Milliseconds of a frame that does not say."""


@dataclass(frozen=True, slots=True)
class Frames:
    images: list[Image.Image]
    seconds: list[float]
    """When each is shown."""


def open_frames(data: bytes, limits: MediaLimits, pace: FrameSampling) -> Frames:
    """Raises `MediaRefused`."""
    container = container_of(data)
    if container is not None:
        return Frames(*decode_video(data, container, limits, pace))
    return _open_pictures(data, limits, pace)


def frames_bytes(data: bytes, limits: MediaLimits) -> int:
    """What `open_frames` takes, at most. How many frames there are is known only once they are decoded."""
    if container_of(data) is not None:
        return limits.pixels * VIDEO_PIXEL_BYTES
    with decoding("video", WANTED):
        film = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(film, limits)
        still = not film.is_animated  # type: ignore[attr-defined]
        frames = film.width * film.height if still else WORK * limits.pixels
        return 4 * frames + pixel_bytes(film) * film.width * film.height


def _open_pictures(data: bytes, limits: MediaLimits, pace: FrameSampling) -> Frames:
    with decoding("video", WANTED):
        film = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(film, limits)
        most = min(MOST, WORK * limits.pixels // (film.width * film.height))
        images, spans = [], []
        for number, frame in enumerate(ImageSequence.Iterator(film)):
            if number == most:
                raise MediaRefused(
                    f"a video has more than {most} frames of {film.width} x {film.height}: this server takes {MOST} "
                    f"frames, and {WORK} times the pixels of the largest image (--media-pixels) in all. Send a shorter "
                    "or smaller one"
                )
            seen = as_rgb(frame)
            images.append(frame.copy() if seen is frame else seen)
            spans.append(float(frame.info.get("duration") or USUAL) / 1000)
    ends = list(accumulate(spans))
    wanted = chosen(ends, pace)
    return Frames([images[number] for number in wanted], [ends[number] - spans[number] for number in wanted])
