"""Files of video: which they are, and their frames, from the child process that decodes them."""

from __future__ import annotations

from dataclasses import asdict

from PIL import Image

from millstream.media.decoder import in_child
from millstream.media.frame_sampling import FrameSampling
from millstream.media.limits import MediaLimits

_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"})
"""What a file of the MP4 kind begins with: the name of its first box, after four bytes of length."""
_EBML = b"\x1aE\xdf\xa3"


def container_of(data: bytes) -> str | None:
    """Which of FFmpeg's readers is to open this file. It is named, never guessed by FFmpeg: its playlists would open
    other files."""
    if data[4:8] in _BOXES:
        return "mov"
    return "matroska" if data.startswith(_EBML) else None


def decode_video(
    data: bytes, container: str, limits: MediaLimits, pace: FrameSampling
) -> tuple[list[Image.Image], list[float]]:
    """The frames to look at, and when each is shown. Raises `MediaRefused`."""
    order = {"kind": "video", "container": container, "sampling": asdict(pace)}
    said, body = in_child(order, data, limits, "video", "Animated GIF, WEBP and PNG are read without it")
    images, at = [], 0
    for width, height in said["sizes"]:
        size = width * height * 3
        images.append(Image.frombytes("RGB", (width, height), body[at : at + size]))
        at += size
    return images, said["seconds"]
