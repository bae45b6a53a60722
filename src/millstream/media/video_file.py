"""Recognises video files and decodes them to frames, in a child process."""

from __future__ import annotations

from dataclasses import asdict

from PIL import Image

from millstream.media.decoder import in_child
from millstream.media.frame_sampling import FrameSampling
from millstream.media.limits import MediaLimits

_MP4_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"})
"""Types that the first box of an MP4 or MOV file may have; the type follows four bytes of length."""
_EBML = b"\x1aE\xdf\xa3"


def video_container(data: bytes) -> str | None:
    """The FFmpeg demuxer for this file, by its first bytes. Returns None if it is not a video file.

    FFmpeg never probes the format itself: its playlist demuxers would open other files.
    """
    if data[4:8] in _MP4_BOXES:
        return "mov"
    return "matroska" if data.startswith(_EBML) else None


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
