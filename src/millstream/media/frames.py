"""Opens a video as frames: Pillow decodes animated images here, a child process decodes video files."""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import accumulate

from PIL import Image, ImageSequence

from millstream.errors import MediaRefused
from millstream.media.frame_sampling import FrameSampling, sample_frames
from millstream.media.images import as_rgb, check_size, decoding, pixel_bytes
from millstream.media.limits import MediaLimits
from millstream.media.signatures import video_container
from millstream.media.video_file import decode_video

FORMATS = ("GIF", "WEBP", "PNG")
ACCEPTED = "send MP4, MOV, WebM or Matroska, or an animated GIF, WEBP or PNG"
ANIMATION_PIXELS = 2
"""Limit on the pixels of all frames of an animated image, as a multiple of the limit for one image: every frame is
decoded and held until the sampled ones are known."""
MAX_ANIMATION_FRAMES = 5_000
"""A file of 20 MB can hold a million frames of one pixel each."""
VIDEO_PIXEL_BYTES = 10
"""Memory per pixel of all frames of a video together: three bytes as the child sends them, four as an image, and a
share for the child."""
DEFAULT_FRAME_MS = 100
"""Duration of a frame that does not state one."""


@dataclass(frozen=True, slots=True)
class Frames:
    images: list[Image.Image]
    seconds: list[float]
    """When each frame is shown."""


def open_frames(data: bytes, limits: MediaLimits, sampling: FrameSampling) -> Frames:
    """Raises `MediaRefused`."""
    container = video_container(data)
    if container is not None:
        return Frames(*decode_video(data, container, limits, sampling))
    return _open_animation(data, limits, sampling)


def frames_bytes(data: bytes, limits: MediaLimits) -> int:
    """Peak memory of `open_frames`, at most: the number of frames is known only after decoding."""
    if video_container(data) is not None:
        return limits.pixels * VIDEO_PIXEL_BYTES
    with decoding("video", ACCEPTED):
        animation = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(animation, limits)
        frame_pixels = animation.width * animation.height
        animated = animation.is_animated  # type: ignore[attr-defined]
        all_pixels = ANIMATION_PIXELS * limits.pixels if animated else frame_pixels
        return 4 * all_pixels + pixel_bytes(animation) * frame_pixels


def _open_animation(data: bytes, limits: MediaLimits, sampling: FrameSampling) -> Frames:
    with decoding("video", ACCEPTED):
        animation = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(animation, limits)
        width, height = animation.size
        max_frames = min(MAX_ANIMATION_FRAMES, ANIMATION_PIXELS * limits.pixels // (width * height))
        images, durations = [], []
        for number, frame in enumerate(ImageSequence.Iterator(animation)):
            if number == max_frames:
                raise MediaRefused(
                    f"the animation has more than {max_frames} frames of {width} x {height}: this server takes "
                    f"{MAX_ANIMATION_FRAMES} frames, and {ANIMATION_PIXELS} times the pixels of the largest image "
                    "(--media-pixels) in total. Send a shorter or smaller one, or a video file"
                )
            rgb = as_rgb(frame)
            images.append(frame.copy() if rgb is frame else rgb)
            durations.append(float(frame.info.get("duration") or DEFAULT_FRAME_MS) / 1000)
    end_times = list(accumulate(durations))
    sampled = sample_frames(end_times, sampling)
    return Frames([images[index] for index in sampled], [end_times[index] - durations[index] for index in sampled])
