"""The child that decodes one video: the file on its input, what to look for as an argument, frames on its output."""

from __future__ import annotations

import json
import math
import resource
import sys

from millstream.errors import MediaRefused
from millstream.media.pace import Pace
from millstream.media.video_decoding import THREADS, decode

MEMORY = 768 * 2**20
"""Of addresses: the interpreter, libraries and the file itself."""
A_PIXEL = 16
"""Bytes of memory for each pixel that a frame may have: the frames that a decoder refers to."""


def main(argument: str) -> None:
    order = json.loads(argument)
    bound(MEMORY + A_PIXEL * order["pixels"], order["seconds"])
    data = sys.stdin.buffer.read()
    try:
        frames = decode(data, order["container"], order["pixels"], Pace(**order["pace"]))
    except MediaRefused as error:
        sys.stdout.write(json.dumps({"refused": error.message}) + "\n")
        return
    sizes = [frame.pixels.shape[1::-1] for frame in frames]
    head = {"sizes": sizes, "seconds": [frame.second for frame in frames]}
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
    for frame in frames:
        sys.stdout.buffer.write(frame.pixels.tobytes())


def bound(memory: int, seconds: float) -> None:
    """Who started this child ends it when its time is over. Should that one be gone, the system does."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_CPU, math.ceil(seconds * THREADS) + 1)
    if sys.platform == "linux":  # macOS has the name of this limit, and does not hold it
        _lower(resource.RLIMIT_AS, memory)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    main(sys.argv[1])
