"""Decodes a file of video in a child process. FFmpeg is a million lines of C that read what a stranger wrote: a crash,
a hang or a greedy header ends the child, and the request gets a refusal. The child is waited for on the CPU pool."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from PIL import Image

from millstream.errors import MediaRefused
from millstream.media.limits import MediaLimits
from millstream.media.pace import Pace

_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"})
"""What a file of the MP4 kind begins with: the name of its first box, after four bytes of length."""
_PASSED = frozenset(
    {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "HOME", "TMPDIR"}
)
_EBML = b"\x1aE\xdf\xa3"


def container_of(data: bytes) -> str | None:
    """Which of FFmpeg's readers is to open this file. It is named, never guessed by FFmpeg: its playlists would open
    other files."""
    if data[4:8] in _BOXES:
        return "mov"
    return "matroska" if data.startswith(_EBML) else None


def decode_video(data: bytes, container: str, limits: MediaLimits, pace: Pace) -> tuple[list[Image.Image], list[float]]:
    """The frames to look at, and when each is shown. Raises `MediaRefused`."""
    if importlib.util.find_spec("av") is None:
        raise MediaRefused(
            "this server reads no files of video: PyAV is not installed (pip install 'millstream[video]'). Animated "
            "GIF, WEBP and PNG are read without it"
        )
    order = {"container": container, "pixels": limits.pixels, "seconds": limits.seconds, "pace": asdict(pace)}
    # -P: nothing is imported from the folder that the server was started in.
    command = [sys.executable, "-P", "-m", "millstream.media.video_child", json.dumps(order)]
    try:
        child = subprocess.run(
            command, input=data, capture_output=True, timeout=limits.seconds, check=False, env=_environment()
        )
    except subprocess.TimeoutExpired as error:
        raise MediaRefused(
            f"a video took longer than {limits.seconds:g} s to decode (--media-timeout). Send a shorter or smaller one"
        ) from error
    if child.returncode:
        raise MediaRefused(f"a video cannot be decoded: {_end_of(child)}. Write it anew, as H.264 in MP4 for example")
    return _frames(child.stdout)


def _environment() -> dict[str, str]:
    """What a child needs to start, and no more: keys of the server are none of its business."""
    return {name: value for name, value in os.environ.items() if name in _PASSED}


def _end_of(child: subprocess.CompletedProcess[bytes]) -> str:
    if child.returncode < 0:
        return f"its decoder was ended by {signal.Signals(-child.returncode).name}"
    lines = child.stderr.decode(errors="replace").strip().splitlines()
    return f"its decoder failed ({lines[-1][:200] if lines else child.returncode})"


def _frames(answer: bytes) -> tuple[list[Image.Image], list[float]]:
    """What `video_child` writes: a line of JSON, then the pixels of each frame."""
    head = answer[: answer.index(b"\n")]
    said: dict[str, Any] = json.loads(head)
    if "refused" in said:
        raise MediaRefused(said["refused"])
    images, at = [], len(head) + 1
    for width, height in said["sizes"]:
        size = width * height * 3
        images.append(Image.frombytes("RGB", (width, height), answer[at : at + size]))
        at += size
    return images, said["seconds"]
