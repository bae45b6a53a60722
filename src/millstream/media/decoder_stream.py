"""Receives samples from the child process that decodes a compressed audio file, while it decodes.

As in `decoder`, one child handles one file, and its crash or hang costs that file only. Here the result is not held
twice, and the time limit grows with what was decoded: hours of audio may take longer than a hang.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from dataclasses import asdict, dataclass
from typing import IO, Any

import numpy as np

from millstream import sandbox
from millstream.errors import MediaRefused
from millstream.media.decoder import check_pyav, decoding_failed, too_slow
from millstream.media.limits import MediaLimits
from millstream.media.wav import CONVERT_HINT
from millstream.speech_types import Samples

PACE = 20.0
"""Seconds of audio that a decoder must decode per second, after the time limit for any file."""
PIECE = 2**18
"""Bytes per read and write."""
STATUS_BYTES = 4096
"""The end of the child's stderr that is kept: its last line says how it ended."""
_LABEL = "audio file"


@dataclass(frozen=True, slots=True)
class SampleStream:
    """A job for the child: one file to mono samples."""

    container: str
    rate: int
    longest: float
    """Seconds. Decoding stops a moment later."""


def decode_samples(data: bytes, job: SampleStream, limits: MediaLimits) -> tuple[Samples, float]:
    """The samples, and how many seconds the file has, as far as it was read. A file that says itself that it is longer
    than wanted is not decoded: then there are no samples. Raises `MediaRefused`."""
    check_pyav(_LABEL, f"WAV needs no decoder: {CONVERT_HINT}", extra="audio")
    seconds = limits.timeout + job.longest / PACE
    argument = {**asdict(job), "kind": "samples", "pixels": 0, "seconds": seconds, "bytes": len(data)}
    command = sandbox.command("millstream.media.decoder_child", json.dumps(argument))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, env=sandbox.environment()) as child:
        try:
            exchange = _Exchange(child, data, job.rate, limits)
            exchange.run()
            code = child.wait(limits.timeout)
        except subprocess.TimeoutExpired as error:
            raise too_slow(_LABEL, limits) from error
        finally:
            child.kill()
    status = exchange.status()
    if "refused" in status:
        raise MediaRefused(status["refused"])
    if code or not status.keys() & {"done", "longer"}:
        raise decoding_failed(_LABEL, "audio", code, exchange.errors)
    samples = np.frombuffer(exchange.received, np.float32)
    return samples, float(status.get("longer", len(samples) / job.rate))


class _Exchange:
    """Writes the file to the child and reads what it decodes, both at once: neither may wait for the other."""

    def __init__(self, child: subprocess.Popen[bytes], data: bytes, rate: int, limits: MediaLimits) -> None:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        self.received = bytearray()
        self.errors = b""
        self._unsent = memoryview(data)
        self._bytes_per_second = rate * 4
        self._limits = limits
        self._start = time.monotonic()
        self._stdin, self._stdout, self._stderr = child.stdin, child.stdout, child.stderr

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            for file, events, serve in (
                (self._stdin, selectors.EVENT_WRITE, self._send),
                (self._stdout, selectors.EVENT_READ, self._receive),
                (self._stderr, selectors.EVENT_READ, self._receive_errors),
            ):
                os.set_blocking(file.fileno(), False)
                selector.register(file, events, serve)
            while selector.get_map():
                for key, _ in selector.select(self._remaining()):
                    key.data()

    def status(self) -> dict[str, Any]:
        """What the child's last line says; empty if it crashed."""
        last = self.errors.rstrip().rpartition(b"\n")[2]
        if not last.startswith(b"{"):
            return {}
        status: dict[str, Any] = json.loads(last)
        return status

    def _remaining(self) -> float:
        decoded = len(self.received) / self._bytes_per_second
        remaining = self._start + self._limits.timeout + decoded / PACE - time.monotonic()
        if remaining <= 0:
            raise too_slow(_LABEL, self._limits)
        return remaining

    def _send(self) -> None:
        try:
            sent = os.write(self._stdin.fileno(), self._unsent[:PIECE])
        except BrokenPipeError:  # it has ended early, and its status says why
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self._selector.unregister(self._stdin)
            self._stdin.close()

    def _receive(self) -> None:
        self.received += self._read(self._stdout)

    def _receive_errors(self) -> None:
        self.errors = (self.errors + self._read(self._stderr))[-STATUS_BYTES:]

    def _read(self, file: IO[bytes]) -> bytes:
        piece = os.read(file.fileno(), PIECE)
        if not piece:
            self._selector.unregister(file)
        return piece
