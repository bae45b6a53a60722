"""A `SpeechService` that speaks what a test says, and tells what happened to it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from millstream.errors import NotFound
from millstream.model_facts import ModelCard
from millstream.speech_types import Samples, SpeechRequest, Voice
from millstream.types import Usage
from support.audio_files import tone

RATE = 24_000
Piece = Samples | Exception
SENTENCES: tuple[Piece, ...] = (tone(440, 0.5, RATE), tone(660, 0.25, RATE))


class FakeSpeech:
    model = "voice"

    def __init__(self, pieces: Sequence[Piece], rate: int, *, ends: bool) -> None:
        self.sample_rate = rate
        self.usage = Usage()
        self.cancelled = threading.Event()
        self.waiting = threading.Event()
        self.left_early = False
        self.given = 0
        self._pieces = pieces
        self._ends = ends
        self._ended = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            self.given += 1
            yield piece.astype(np.float32).tobytes()
        if not self._ends:
            self.waiting.set()
            await asyncio.Event().wait()
        self.usage = Usage(prompt_tokens=11, completion_tokens=7)
        self._ended = True

    def cancel(self) -> None:
        if not self.cancelled.is_set():
            self.left_early = not self._ended
        self.cancelled.set()


@dataclass
class FakeSpeechService:
    """`ends`: False to stay silent after the pieces."""

    pieces: Sequence[Piece] = SENTENCES
    rate: int = RATE
    ends: bool = True
    start_error: Exception | None = None
    requests: list[SpeechRequest] = field(default_factory=list)
    speeches: queue.Queue[FakeSpeech] = field(default_factory=queue.Queue)
    cards: Sequence[ModelCard] = (
        ModelCard("chat", created=11, state="ready", capabilities=("completion",)),
        ModelCard("voice", created=12, state="ready", capabilities=("speech",)),
    )

    def models(self) -> Sequence[ModelCard]:
        return self.cards

    async def start(self, request: SpeechRequest) -> FakeSpeech:
        self.requests.append(request)
        if self.start_error is not None:
            raise self.start_error
        speech = FakeSpeech(self.pieces, self.rate, ends=self.ends)
        self.speeches.put(speech)
        return speech

    async def voices(self, model: str) -> Sequence[Voice]:
        if model not in ("", "voice"):
            raise NotFound(f"There is no model {model!r} on this server.", param="model")
        return (Voice("af_heart", "en-us", "female"), Voice("plain"))
