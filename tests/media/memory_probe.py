"""Opens one media file and prints the result and the peak memory as JSON. Linux only."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from PIL import Image

from millstream.errors import MediaRefused
from millstream.media.frame_sampling import FrameSampling
from millstream.media.frames import frames_bytes, open_frames
from millstream.media.images import image_bytes, open_image
from millstream.media.limits import MediaLimits


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main(kind: str, path: str) -> None:
    data, limits = Path(path).read_bytes(), MediaLimits()
    Image.init()
    result: dict[str, object] = {"refused": None}
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    try:
        if kind == "image":
            result["estimate"] = image_bytes(data, limits)
            image = open_image(data, limits)
            result |= {"size": image.size, "pixel": image.getpixel((0, 0))}
        else:
            result["estimate"] = frames_bytes(data, limits)
            result["frames"] = len(open_frames(data, limits, FrameSampling()).images)
    except MediaRefused as error:
        result["refused"] = error.message
    print(json.dumps(result | {"peak": status("VmHWM") - before}))


main(*sys.argv[1:])
