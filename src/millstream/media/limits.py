"""Limits on the media of a request: sizes, counts, times, and where files may come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MediaLimits:
    file_bytes: int = 20 * 2**20
    """Size of one file."""
    pixels: int = 40_000_000
    """Width times height of one image or video frame; also of all sampled frames of a video together."""
    count: int = 16
    """Files per request."""
    timeout: float = 10.0
    """Seconds for one whole fetch (DNS, redirects and body), and again for decoding one video or audio file."""
    folders: tuple[Path, ...] = ()
    """Local files are read only below these."""
    allow_private: bool = False
    """True if files may be fetched from addresses that are not public."""
    audio_seconds: float = 300.0
    """Length of one audio file. A model may take less."""
    bytes_option: str = "--media-bytes"
    """The option that sets `file_bytes`, for errors."""
    seconds_option: str = "--media-seconds"
    """The option that sets `audio_seconds`, for errors."""
