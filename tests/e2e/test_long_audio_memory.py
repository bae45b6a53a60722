"""Half an hour of audio in bounded memory, with a tiny random model: its words mean nothing, but all of it is heard."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from millstream.config import Settings
from support.audio_files import chunk, riff
from support.recording import jfk_samples
from support.server import RunningServer, running
from support.spoken import noise, pause
from support.tiny_whisper import write_whisper

MINUTES = 30
MIB = 2**20
SPOKEN = (20, 1_000, 1_780)
"""Seconds at which somebody speaks for eleven seconds."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running(Settings((str(write_whisper(tmp_path / "whisper")),), port=0, isolation="thread")) as subject:
        yield subject


class Peak:
    """The most memory that this process takes meanwhile."""

    def __enter__(self) -> Peak:
        self._process = psutil.Process()
        self.before = self.most = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.most = max(self.most, self._process.memory_info().rss)


def test_half_an_hour(server: RunningServer, tmp_path: Path) -> None:
    """At 32 kHz, so that it is resampled: 29 million samples of 16 kHz take 110 MiB, and the file as much. Speech is
    rare: the model has windows of one second."""
    ground = np.concatenate([pause(60), noise(60, 0.001)])
    samples = np.tile(ground, MINUTES // 2)
    for begin in SPOKEN:
        samples[begin * 16_000 :][: 11 * 16_000] += jfk_samples()
    path = tmp_path / "long.wav"
    form_at_32_khz = struct.pack("<HHIIHH", 1, 1, 32_000, 64_000, 2, 16)
    body = np.repeat((samples * 32_767).astype("<i2"), 2).tobytes()
    path.write_bytes(riff(chunk(b"fmt ", form_at_32_khz), chunk(b"data", body)))
    size, bare = path.stat().st_size, samples.nbytes
    del samples, body
    form = {"response_format": "verbose_json", "temperature": "1"}  # one attempt per window
    url = f"{server.url}/v1/audio/transcriptions"
    with path.open("rb") as file, Peak() as peak:
        transcript = httpx.post(url, files={"file": file}, data=form, timeout=600).raise_for_status().json()
    assert transcript["duration"] == MINUTES * 60
    taken = peak.most - peak.before
    assert taken < size + bare + 128 * MIB, f"{taken / MIB:.0f} MiB for a file of {size / MIB:.0f} MiB"
    starts = [segment["start"] for segment in transcript["segments"]]
    assert starts == sorted(starts)
    for begin in SPOKEN:
        assert [start for start in starts if begin <= start < begin + 11]
    assert all(any(begin - 1 <= start < begin + 12 for begin in SPOKEN) for start in starts)
