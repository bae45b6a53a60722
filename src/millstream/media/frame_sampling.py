"""Selects which frames of a video to decode. Imports no image library: the decoder child needs none."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrameSampling:
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 64


def sample_frames(end_times: list[float], sampling: FrameSampling) -> list[int]:
    """Indices of the frames to use, evenly spaced in time and without repeats. `end_times`: when each frame ends."""
    wanted = max(sampling.min_frames, round(end_times[-1] * sampling.fps))
    count = max(1, min(len(end_times), sampling.max_frames, wanted))
    times = [end_times[-1] * number / count for number in range(count)]
    return sorted({min(bisect_right(end_times, time + 1e-9), len(end_times) - 1) for time in times})
