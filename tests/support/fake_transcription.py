"""A transcription service without a model: gives the segments that the test puts there."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from millstream.speech_types import Segment, TranscriptionRequest, Word
from millstream.types import Usage

WAIT = 60

SEGMENTS = (
    Segment(
        0.0,
        2.5,
        " And so, my fellow Americans,",
        tokens=(843, 523, 11),
        avg_logprob=-0.25,
        compression_ratio=1.1,
        no_speech_prob=0.01,
        words=(Word(" And", 0.3, 0.5, 0.9), Word(" so,", 0.5, 0.9, 0.8), Word(" my", 1.0, 1.25, 0.99)),
    ),
    Segment(
        3.25, 3661.042, " ask <not> & what --> your\n\ncountry ", tokens=(1265,), words=(Word(" ask", 3.25, 3.5, 0.7),)
    ),
    Segment(3662.0, 3662.0, "  "),
    Segment(3663.0, 3664.5, " can do."),
)
TEXT = "And so, my fellow Americans, ask <not> & what --> your\n\ncountry    can do."

Step = Segment | Exception | None


class FakeTranscription:
    """Yields from its queue; None ends it."""

    def __init__(self, model: str, steps: Sequence[Step], language: str | None) -> None:
        self.model = model
        self.duration = 3665.0
        self.language = language
        self.usage = Usage()
        self.cancelled = threading.Event()
        self.left_early = False
        self.waiting = threading.Event()
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        for step in steps:
            self._steps.put_nowait(step)

    async def __aiter__(self) -> AsyncIterator[Segment]:
        while True:
            if self._steps.empty():
                self.waiting.set()
            step = await self._steps.get()
            if step is None:
                self._ended = True
                self.usage = Usage(prompt_tokens=4, completion_tokens=9)
                return
            if isinstance(step, Exception):
                raise step
            yield step

    def cancel(self) -> None:
        if not self.cancelled.is_set():
            self.left_early = not self._ended
        self.cancelled.set()

    def push(self, step: Step) -> None:
        """Called from the test's thread."""
        self._loop.call_soon_threadsafe(self._steps.put_nowait, step)


@dataclass
class FakeTranscriptions:
    steps: Sequence[Step] = (*SEGMENTS, None)
    language: str | None = "en"
    start_error: Exception | None = None
    hold_start: bool = False
    requests: list[TranscriptionRequest] = field(default_factory=list)
    started: queue.Queue[FakeTranscription] = field(default_factory=queue.Queue)
    start_entered: threading.Event = field(default_factory=threading.Event)
    start_cancelled: threading.Event = field(default_factory=threading.Event)

    async def start(self, request: TranscriptionRequest) -> FakeTranscription:
        self.requests.append(request)
        self.start_entered.set()
        if self.hold_start:
            try:
                await asyncio.Event().wait()
            finally:
                self.start_cancelled.set()
        if self.start_error is not None:
            raise self.start_error
        made = FakeTranscription(request.model or "first", self.steps, self.language)
        self.started.put(made)
        return made

    def transcription(self) -> FakeTranscription:
        return self.started.get(timeout=WAIT)
