"""Decodes video files to frames, in a child process."""

from __future__ import annotations

from dataclasses import asdict

from PIL import Image

from millstream.media.decoder import in_child
from millstream.media.frame_sampling import FrameSampling
from millstream.media.limits import MediaLimits


def decode_video(
    data: bytes, container: str, limits: MediaLimits, sampling: FrameSampling
) -> tuple[list[Image.Image], list[float]]:
    """The sampled frames, and the second at which each is shown. Raises `MediaRefused`."""
    job = {"kind": "video", "container": container, "sampling": asdict(sampling)}
    header, body = in_child(job, data, limits, "video", "Animated GIF, WEBP and PNG need no decoder")
    images, offset = [], 0
    for width, height in header["sizes"]:
        size = width * height * 3
        images.append(Image.frombytes("RGB", (width, height), body[offset : offset + size]))
        offset += size
    return images, header["seconds"]
