"""The messages of transcription engines: windows of audio in, their text out.

A request is the audio of one client. It is cut into windows, of which only some are in the engine at any time: so an
hour of audio takes no more memory than a minute, and its windows run beside those of other requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from millstream.engine.messages import EVENT_BYTES, Command, Finished, Output, Submit

Task = Literal["transcribe", "translate"]

SAMPLE_BYTES = 4
"""Samples travel as 32-bit floats of this machine, `speech_types.SPEECH_RATE` of them per second."""


@dataclass(frozen=True, slots=True)
class Options:
    """What holds for all windows of a request."""

    task: Task = "transcribe"
    language: str | None = None
    """None: the model finds out, from the first window, if it can."""
    prompt: str = field(default="", repr=False)
    """Not in the log: it is a user's text."""
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """The first one is tried, then the next ones as long as the result looks wrong."""
    words: bool = False
    seed: int = 0
    quick: bool = False
    """The text is wanted soon, even if it becomes a little worse."""


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of a request's audio, at most as long as the model's window."""

    index: int
    """Its number in the request. Any order is fine, but each number is used once."""
    samples: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Transcribe(Submit):
    """Transcribe windows. A `WindowText` follows for each one, in any order, and `Transcribed` ends the request."""

    options: Options
    windows: tuple[Window, ...]
    complete: bool = True
    """False if `AddWindows` will bring more. The request then goes on until one that says so."""


@dataclass(frozen=True, slots=True)
class AddWindows(Command):
    """More windows of a request. Ignored if the request has ended: the race is normal."""

    request_id: int
    windows: tuple[Window, ...]
    complete: bool = False


@dataclass(frozen=True, slots=True)
class WordTime:
    text: str = field(repr=False)
    start: float
    end: float
    probability: float = 1.0


@dataclass(frozen=True, slots=True)
class WindowSegment:
    """A stretch of speech. Times are in seconds from the begin of the window."""

    start: float
    end: float
    text: str = field(repr=False)
    tokens: tuple[int, ...] = field(default=(), repr=False)
    words: tuple[WordTime, ...] = ()


@dataclass(frozen=True, slots=True)
class WindowText(Output):
    """The text of a window. No segments: nobody speaks in it."""

    index: int
    segments: tuple[WindowSegment, ...]
    language: str | None = None
    """The code of the language that is spoken, if the model knows it."""
    consumed: float | None = None
    """Seconds of the window that the segments account for. What comes after them must be sent again as another window:
    the model has stopped in the middle of a sentence. None: all of it."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 1.0
    no_speech_prob: float = 0.0

    @property
    def nbytes(self) -> int:
        return EVENT_BYTES * (1 + sum(1 + len(segment.words) for segment in self.segments))


@dataclass(frozen=True, slots=True)
class Transcribed(Finished):
    """The texts of all windows were sent, or the request was cancelled."""
