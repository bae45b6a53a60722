"""Transcribes through a running server's service, without HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millstream.server import MillServer
from millstream.speech_types import Segment, TranscriptionRequest
from millstream.types import Usage
from support.server import RunningServer

PATIENCE = 300
"""Seconds: real weights take a second per window on a quiet machine."""


@dataclass(frozen=True)
class Transcript:
    segments: tuple[Segment, ...]
    language: str | None
    duration: float
    usage: Usage

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def words(self) -> list[str]:
        """Without punctuation, in lower case."""
        return "".join(char for char in self.text.lower() if char.isalnum() or char == " ").split()


async def transcript(server: MillServer, request: TranscriptionRequest) -> Transcript:
    running = await server.mill.services.transcription.start(request)
    segments = tuple([segment async for segment in running])
    return Transcript(segments, running.language, running.duration, running.usage)


def transcribed(server: RunningServer, audio: Any, model: str = "", **options: Any) -> Transcript:
    """Raises what the service raises."""
    found = server.call(lambda running: transcript(running, TranscriptionRequest(model, audio, **options)), PATIENCE)
    assert isinstance(found, Transcript)
    return found
