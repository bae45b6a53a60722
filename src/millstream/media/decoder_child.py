"""The child that decodes one file: it is on its input, what to look for is an argument, what is found its output."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from millstream import sandbox
from millstream.errors import MediaRefused
from millstream.media import audio_decoding, video_decoding
from millstream.media.container import THREADS
from millstream.media.frame_sampling import FrameSampling

MEMORY = 768 * 2**20
"""Of addresses: the interpreter, libraries and the file itself."""
A_PIXEL = 16
"""Bytes of memory for each pixel that a frame may have: the frames that a decoder refers to."""


def main(argument: str) -> None:
    order = json.loads(argument)
    # Who started this child ends it when its time is over. Should that one be gone, the system does.
    cpu_seconds = math.ceil(order["seconds"] * THREADS) + 1
    sandbox.limit(memory=MEMORY + A_PIXEL * order["pixels"], cpu_seconds=cpu_seconds)
    try:
        head, bodies = (_audio if order["kind"] == "audio" else _video)(sys.stdin.buffer.read(), order)
    except MediaRefused as error:
        head, bodies = {"refused": error.message}, []
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
    for body in bodies:
        sys.stdout.buffer.write(body)


def _video(data: bytes, order: dict[str, Any]) -> tuple[dict[str, object], list[bytes]]:
    frames = video_decoding.decode(data, order["container"], order["pixels"], FrameSampling(**order["sampling"]))
    sizes = [frame.pixels.shape[1::-1] for frame in frames]
    head: dict[str, object] = {"sizes": sizes, "seconds": [frame.second for frame in frames]}
    return head, [frame.pixels.tobytes() for frame in frames]


def _audio(data: bytes, order: dict[str, Any]) -> tuple[dict[str, object], list[bytes]]:
    samples = audio_decoding.decode(data, order["container"], order["rate"], order["longest"])
    return {}, [samples.tobytes()]


if __name__ == "__main__":
    main(sys.argv[1])
