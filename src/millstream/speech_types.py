"""Requests and results of speech models, in plain data: from sound to text and from text to sound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

SPEECH_RATE = 16_000
"""Samples per second of the sound that transcription models take."""

Samples = npt.NDArray[np.float32]
"""Mono sound, from -1 to 1."""


@dataclass(frozen=True, slots=True, eq=False)
class TranscriptionRequest:
    """A request for a transcript, from any dialect."""

    model: str
    audio: bytes | str | Samples
    """The content of a file, the address of one (a URL or a data URI), or samples at `SPEECH_RATE`."""
    task: Literal["transcribe", "translate"] = "transcribe"
    """`translate`: into English."""
    language: str | None = None
    """A code of two or three letters. None: the model finds out."""
    prompt: str | None = None
    """Text that came before, or words to expect: it steers spelling and style."""
    temperature: float | None = None
    """None: greedy, and higher ones only where the result looks wrong."""
    words: bool = False
    """Give the times of each word."""
    quick: bool = False
    """The text is wanted soon: a model may read short audio in a shorter window, at some cost in accuracy."""


@dataclass(frozen=True, slots=True)
class Word:
    text: str
    start: float
    """Seconds from the begin of the audio."""
    end: float
    probability: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech. Times are in seconds from the begin of the audio."""

    start: float
    end: float
    text: str
    """As the model wrote it: it may begin with a space, so that texts can be joined."""
    tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 1.0
    no_speech_prob: float = 0.0
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A request to speak a text, from any dialect."""

    model: str
    text: str
    voice: str | None = None
    """None: the model's default. Some models take a mix: `af_bella+af_sky`."""
    speed: float = 1.0
    language: str | None = None
    """None: that of the voice."""
    instructions: str | None = None
    """How to speak, for models that take it."""


@dataclass(frozen=True, slots=True)
class Voice:
    """A voice of a speech model."""

    name: str
    language: str | None = None
    gender: str | None = None
