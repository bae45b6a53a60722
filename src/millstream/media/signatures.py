"""Recognises media files by their first bytes, and names the FFmpeg demuxer for each.

FFmpeg never probes the format itself: its playlist demuxers would open other files.
"""

from __future__ import annotations

_MP4_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"})
"""Types that the first box of an MP4 or MOV file may have; the type follows four bytes of length."""
_EBML = b"\x1aE\xdf\xa3"
_SIGNATURES = {b"OggS": "ogg", b"fLaC": "flac", b"ID3": "mp3"}


def video_container(data: bytes) -> str | None:
    """Returns None if it is not a video file."""
    if data[4:8] in _MP4_BOXES:
        return "mov"
    return "matroska" if data.startswith(_EBML) else None


def audio_container(data: bytes) -> str | None:
    """Returns None if it is not a compressed audio file. One that holds video may hold audio too."""
    for signature, name in _SIGNATURES.items():
        if data.startswith(signature):
            return name
    # An MP3 frame starts with eleven set bits; in a raw AAC (ADTS) frame two zero bits follow.
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        return "aac" if data[1] & 0xF6 == 0xF0 else "mp3"
    return video_container(data)
