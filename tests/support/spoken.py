"""Made-up audio: something that a voice activity detector takes for speech, and things that it must not."""

from __future__ import annotations

import numpy as np

from millstream.speech_types import Samples


def pause(seconds: float, rate: int = 16_000) -> Samples:
    return np.zeros(round(seconds * rate), np.float32)


def noise(seconds: float, volume: float, rate: int = 16_000) -> Samples:
    return (np.random.default_rng(3).normal(size=round(seconds * rate)) * volume).astype(np.float32)


def hum(seconds: float, hertz: float, rate: int = 16_000) -> Samples:
    """Mains hum with overtones."""
    times = np.arange(round(seconds * rate)) / rate
    tones = [np.sin(2 * np.pi * hertz * order * times + order) / order for order in range(1, 12)]
    return (0.1 * np.sum(tones, axis=0)).astype(np.float32)


def spoken(seconds: float, rate: int = 16_000) -> Samples:
    """Syllables of 180 ms: a buzz of changing pitch through resonances that move, with a hiss now and then."""
    count = round(seconds * rate)
    random = np.random.default_rng(7)
    times = np.arange(count) / rate
    syllable = (times / 0.18).astype(int)
    kinds = int(syllable[-1]) + 1 if count else 0
    pitch = random.uniform(90, 180, kinds)[syllable]
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    total = np.zeros(count)
    low, high = random.uniform(300, 800, kinds)[syllable], random.uniform(900, 2500, kinds)[syllable]
    for order in range(1, 22):
        hertz = pitch * order
        strength = np.exp(-np.square((hertz - low) / 150)) + 0.5 * np.exp(-np.square((hertz - high) / 250)) + 0.01
        total += np.where(hertz < min(3500, rate / 2), strength * np.sin(order * phase), 0)
    shape = 0.15 + 0.85 * np.sin(np.pi * (times / 0.18 % 1)) ** 0.7
    hiss = random.normal(size=count) * (syllable % 4 == 3)
    return (0.15 * shape * (total * (syllable % 4 != 3) + 0.3 * hiss)).astype(np.float32)
