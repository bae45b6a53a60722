"""The child process that decodes one media file: the file on stdin, the job as a JSON argument, the result on stdout.

The result is a line of JSON, then raw frames or samples. Long audio is sent as raw samples while it is decoded, and
its line of JSON comes last, on stderr.
"""

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

BASE_MEMORY = 768 * 2**20
"""Address space for the interpreter, the libraries and the file itself."""
BYTES_PER_PIXEL = 16
"""Memory per pixel that a frame may have: a decoder holds several reference frames."""


COPIES = 3
"""Of a large file, while it is read."""


def main(argument: str) -> None:
    job = json.loads(argument)
    # The parent kills this child at its timeout. If the parent is gone, the CPU limit ends it.
    cpu_seconds = math.ceil(job["seconds"] * THREADS) + 1
    memory = BASE_MEMORY + BYTES_PER_PIXEL * job["pixels"] + COPIES * job.get("bytes", 0)
    sandbox.limit(memory=memory, cpu_seconds=cpu_seconds)
    if job["kind"] == "samples":
        _send_samples(sys.stdin.buffer.read(), job)
        return
    try:
        header, bodies = (_audio if job["kind"] == "audio" else _video)(sys.stdin.buffer.read(), job)
    except MediaRefused as error:
        header, bodies = {"refused": error.message}, []
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n")
    for body in bodies:
        sys.stdout.buffer.write(body)


def _video(data: bytes, job: dict[str, Any]) -> tuple[dict[str, object], list[bytes]]:
    frames = video_decoding.decode(data, job["container"], job["pixels"], FrameSampling(**job["sampling"]))
    sizes = [frame.pixels.shape[1::-1] for frame in frames]
    header: dict[str, object] = {"sizes": sizes, "seconds": [frame.second for frame in frames]}
    return header, [frame.pixels.tobytes() for frame in frames]


def _audio(data: bytes, job: dict[str, Any]) -> tuple[dict[str, object], list[bytes]]:
    samples = audio_decoding.decode(data, job["container"], job["rate"], job["longest"])
    return {}, [samples.tobytes()]


def _send_samples(data: bytes, job: dict[str, Any]) -> None:
    """Writes samples as they are decoded. The last line of stderr says whether all of it went well."""
    status: dict[str, object] = {"done": True}
    try:
        for piece in audio_decoding.pieces(data, job["container"], job["rate"], job["longest"], whole=True):
            sys.stdout.buffer.write(piece.tobytes())
    except MediaRefused as error:
        status = {"refused": error.message}
    except audio_decoding.LongerAudio as longer:
        status = {"longer": longer.seconds}
    sys.stdout.buffer.flush()
    sys.stderr.write("\n" + json.dumps(status) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
