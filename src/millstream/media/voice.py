"""Voice activity detection: finds where phrases begin and end, in a stream of samples.

Two things must come together. *Activity*: the level in bands of speech is above the noise floor of that band, which is
the lowest level of the last seconds; so it does not matter how loud speech, hum or noise are. *Change*: within an
active stretch the spectrum changes from syllable to syllable. Noise or hum that sets in is active until the floor has
learned it, but it does not change.

What is found does not depend on how the samples are divided between calls.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Literal

import numpy as np
import numpy.typing as npt

from millstream.speech_types import Samples

Levels = npt.NDArray[np.float32]

HOP_SECONDS = 0.016
"""From one frame to the next. A frame is two hops long."""
EDGES = (200, 400, 630, 920, 1270, 1720, 2320, 3150, 4400, 6400)
"""Limits of the bands in hertz: steps of about two critical bands of hearing."""
QUIETEST = -85.0
"""Level (dB of full scale, per band) below which nothing is heard: the rounding noise of 16 bits is below it."""
FLOOR_FRAMES = 250
"""The floor is the minimum of so many frames: longer than speech goes on in a band without a gap."""
FIRST_FLOOR, FIRST_FRAMES = -65.0, 60
"""A stream that begins with speech: this floor is assumed for its first frames."""
FLOOR_BIAS = 2.5
"""How far the mean of noise is above its minimum, in dB."""
LOUD_ENOUGH = 20.0
"""dB above the floor that count in one band: more is not more speech."""
ACTIVE, STILL_ACTIVE = 3.0, 1.5
"""Mean of the bands' levels above the floor, in dB, that begins activity, and that keeps it going."""
SPAN = 3
"""Frames over which change is measured, and over which levels are smoothed."""
CHANGE = 1.7
"""Median change of the spectrum's shape, in dB, from which on it is speech: steady noise has about 1, speech 3."""
ONSET = 5
"""Frames at the begin of activity whose change is that of the onset itself."""
JUDGED, ENOUGH = 24, 8
"""The change of at most so many frames is looked at, and of at least so many."""
BLOCK = 2048
"""Frames that are computed at once: bounds the memory for long audio."""
TAIL = 0.3
"""Seconds after the last activity that still belong to a phrase, if the silence is as long."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A phrase begins or ends."""

    kind: Literal["begin", "end"]
    position: int
    """In samples from the first one. A begin is in the past: it is known only some syllables later."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """What depends on the rate."""

    hop: int
    window: npt.NDArray[np.float32]
    bands: npt.NDArray[np.float32]
    """From the power spectrum to the bands' levels relative to full scale."""


@cache
def _shape(rate: int) -> _Shape:
    if rate < 4000:
        raise ValueError(f"speech needs at least 4000 samples per second, not {rate}")
    hop = round(HOP_SECONDS * rate)
    window = np.hanning(2 * hop + 1)[:-1].astype(np.float32)
    hertz = np.fft.rfftfreq(2 * hop, 1 / rate)
    limits = [edge for edge in EDGES if edge <= rate / 2]
    members = np.stack([(hertz >= low) & (hertz < high) for low, high in itertools.pairwise(limits)])
    # A full-scale sine has level 0 in its band.
    bands = (members * (8 / np.square(window.sum())) / 1.5).astype(np.float32).T
    return _Shape(hop, window, np.ascontiguousarray(bands))


def band_levels(samples: Samples, rate: int) -> Levels:
    """Levels in dB, (frames, bands), of all frames that are complete."""
    shape = _shape(rate)
    count = max(len(samples) // shape.hop - 1, 0)
    levels = np.empty((count, shape.bands.shape[1]), np.float32)
    for first in range(0, count, BLOCK):
        piece = samples[first * shape.hop : (min(first + BLOCK, count) + 1) * shape.hop]
        frames = np.lib.stride_tricks.sliding_window_view(piece, 2 * shape.hop)[:: shape.hop]
        power = np.square(np.abs(np.fft.rfft(frames * shape.window, axis=1))).astype(np.float32)
        levels[first : first + len(frames)] = 10 * np.log10(power @ shape.bands + 10 ** (QUIETEST / 10))
    return levels


def _lowest(levels: Levels, frames: int) -> Levels:
    """The minimum of each frame and of the `frames` - 1 before it, for all frames that have so many before them."""
    width = 1
    while 2 * width <= frames:
        levels = np.minimum(levels[width:], levels[:-width])
        width *= 2
    rest = frames - width
    return np.minimum(levels[rest:], levels[: len(levels) - rest]) if rest else levels


class PhraseDetector:
    """Takes samples as they come. For one stream; not safe for threads."""

    def __init__(self, rate: int, *, threshold: float = 0.5, padding: float = 0.3, silence: float = 0.5) -> None:
        """`threshold`: from 0 to 1; higher takes louder speech only. `padding`: seconds that a phrase begins before its
        first sound. `silence`: seconds without speech that end a phrase."""
        self._rate = rate
        self._hop = _shape(rate).hop
        factor = 4.0 ** (2 * threshold - 1)
        self._active, self._still_active = ACTIVE * factor, STILL_ACTIVE * factor
        self._padding = round(padding * rate)
        self._silence = max(round(silence / HOP_SECONDS), 1)
        self._tail = round(min(silence, TAIL) * rate)
        self._samples = np.zeros(0, np.float32)
        self._fed = 0
        bands = _shape(rate).bands.shape[1]
        self._levels = np.zeros((0, bands), np.float32)
        """Of the last frames, for smoothing."""
        self._smooth = np.full((FLOOR_FRAMES, bands), np.inf, np.float32)
        """Smoothed levels of the last frames."""
        self._smooth[: FIRST_FRAMES + 1] = FIRST_FLOOR
        self._smooth[-SPAN:] = 0.0
        self._state = _Candidate()
        self._frame = 0
        self._phrase = False
        self._last_end = 0

    @property
    def speaking(self) -> bool:
        """True within a phrase."""
        return self._phrase

    @property
    def fed(self) -> int:
        """Samples that were fed."""
        return self._fed

    @property
    def quiet_since(self) -> int:
        """Up to which sample a phrase that has not begun yet cannot reach back: what is before may be forgotten."""
        first = self._state.first if self._state.running else self._frame
        return max(first * self._hop - self._padding, self._last_end)

    def learn_floor(self, samples: Samples) -> None:
        """Before the first `feed`, if more of the audio is known already: takes the noise floor from its begin."""
        levels = band_levels(samples[: (FLOOR_FRAMES + 1) * self._hop], self._rate)
        if len(levels) >= SPAN:
            self._smooth[:-SPAN] = _smoothed(levels).min(axis=0)

    def feed(self, samples: Samples) -> list[Edge]:
        """The edges of phrases that are known with these samples, in order: begin, end, begin, ..."""
        self._fed += len(samples)
        edges: list[Edge] = []
        step = BLOCK * self._hop
        for at in range(0, len(samples), step):
            edges += self._feed(samples[at : at + step])
        return edges

    def end(self) -> list[Edge]:
        """The stream has ended: the end of the phrase that was being spoken, if any."""
        return self._end_phrase(self._fed) if self._phrase else []

    def _feed(self, samples: Samples) -> list[Edge]:
        self._samples = np.concatenate([self._samples, samples])
        new = band_levels(self._samples, self._rate)
        self._samples = self._samples[len(new) * self._hop :].copy()
        levels = np.concatenate([self._levels, new])
        self._levels = levels[-(SPAN - 1) :].copy()
        smooth = _smoothed(levels)
        if not len(smooth):
            return []
        history = np.concatenate([self._smooth, smooth])
        self._smooth = history[-FLOOR_FRAMES:].copy()
        floor = _lowest(history, FLOOR_FRAMES)[1:]
        above = np.clip(smooth - floor - FLOOR_BIAS, 0, LOUD_ENOUGH).mean(axis=1)
        change = smooth - history[FLOOR_FRAMES - SPAN : -SPAN]
        change = np.abs(change - change.mean(axis=1, keepdims=True)).mean(axis=1)
        return self._judge(above.tolist(), change.tolist())

    def _judge(self, above: Sequence[float], change: Sequence[float]) -> list[Edge]:
        edges: list[Edge] = []
        state = self._state
        for level, difference in zip(above, change, strict=True):
            frame, self._frame = self._frame, self._frame + 1
            if level > (self._still_active if state.active else self._active):
                state.sound(frame, difference)
                if not self._phrase and state.is_speech():
                    self._phrase = True
                    position = max(state.first * self._hop - self._padding, self._last_end)
                    edges.append(Edge("begin", position))
            elif state.running:
                state.active = 0
                if frame - state.last >= self._silence:
                    if self._phrase:
                        edges += self._end_phrase(self._fed)
                    state = self._state = _Candidate()
        return edges

    def _end_phrase(self, most: int) -> list[Edge]:
        self._phrase = False
        # Smoothing and the frame's own length reach past its begin.
        last = (self._state.last + SPAN + 1) * self._hop + self._tail
        self._last_end = min(last, most)
        return [Edge("end", self._last_end)]


class _Candidate:
    """Activity that may be a phrase, with pauses that are shorter than the silence that ends one."""

    def __init__(self) -> None:
        self.first = 0
        self.last = 0
        self.active = 0
        """Frames since this activity began; 0 in a pause."""
        self.running = False
        self._changes: deque[float] = deque(maxlen=JUDGED)

    def sound(self, frame: int, change: float) -> None:
        if not self.running:
            self.running, self.first = True, frame
        self.last = frame
        self.active += 1
        if self.active > ONSET:
            self._changes.append(change)

    def is_speech(self) -> bool:
        return len(self._changes) >= ENOUGH and median(self._changes) >= CHANGE


def _smoothed(levels: Levels) -> Levels:
    """The mean of each `SPAN` neighbours."""
    count = max(len(levels) - SPAN + 1, 0)
    total = levels[:count].copy()
    for shift in range(1, SPAN):
        total += levels[shift : shift + count]
    return total / np.float32(SPAN)
