"""A step of a transcription engine as data: which windows begin, which are dropped, and what has become of the rest.

A window that has begun is a row. Rows of all requests advance together, one token per step, until their text ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.engine.protocols import Backend
from millstream.engine.transcription.messages import Options, Transcribe, WindowText
from millstream.model_facts import TranscriptionFacts

RowKey = tuple[int, int]
"""The ids of a request and of its window."""


@dataclass(frozen=True, slots=True)
class WindowStart:
    request_id: int
    index: int
    samples: bytes = field(repr=False)
    """Not in the log, which has the plan of a step that failed: it is a user's voice."""
    options: Options
    """With the language, once it is known for the request."""

    @property
    def key(self) -> RowKey:
        return self.request_id, self.index


@dataclass(frozen=True, slots=True)
class TranscriptionPlan:
    start: tuple[WindowStart, ...]
    drop: tuple[RowKey, ...] = ()
    """Rows whose request was cancelled. They are dropped before anything else."""


@dataclass(frozen=True, slots=True)
class TranscriptionResult:
    done: tuple[WindowText, ...]
    """Rows that have ended."""
    languages: tuple[tuple[int, str], ...] = ()
    """The language that was found for a request, as soon as it is known."""


TranscriptionBackend = Backend[Transcribe, TranscriptionPlan, TranscriptionResult, TranscriptionFacts]
