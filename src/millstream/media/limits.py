"""How much media a request may bring, and where it may come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MediaLimits:
    size: int = 20 * 2**20
    """Bytes of one file."""
    pixels: int = 40_000_000
    """Width times height of one image; of one frame of a video, and of all frames of it that are kept together."""
    count: int = 16
    """Files of one request."""
    seconds: float = 10.0
    """For all of one fetch: names, redirects and body; and again for the decoding of one file of video."""
    folders: tuple[Path, ...] = ()
    """Local files are read below these alone."""
    private: bool = False
    """Whether addresses that are not public may be fetched from."""
    sound: float = 300.0
    """Seconds of one sound. A model may take less."""
