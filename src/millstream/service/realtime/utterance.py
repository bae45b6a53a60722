"""Transcribes one phrase, piece by piece as it is spoken."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from millstream.errors import MillstreamError
from millstream.realtime_types import InputTranscription
from millstream.service.ports import TranscriptionService
from millstream.speech_types import SPEECH_RATE, Samples, TranscriptionRequest

log = logging.getLogger(__name__)

PROMPT_CHARS = 200
"""Of the text before a piece, which the model gets as its context."""
DEFECT = "The server failed to transcribe this."


class Listener(Protocol):
    """Is told what becomes of a phrase."""

    def heard(self, item_id: str, text: str) -> None:
        """More text. What was told is never taken back."""
        ...

    def understood(self, item_id: str, text: str, seconds: float) -> None:
        """The whole text. It is empty if nobody spoke."""
        ...

    def misheard(self, item_id: str, error: MillstreamError) -> None: ...


class Backlog:
    """Audio of a session that is not transcribed yet, in samples."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._samples = 0
        self._changed = asyncio.Event()

    def change(self, samples: int) -> None:
        self._samples += samples
        self._changed.set()

    async def room(self) -> None:
        """Returns once there is room for more audio."""
        while self._samples > self._most:
            self._changed.clear()
            await self._changed.wait()


class Utterance:
    """A phrase that becomes text. Phrases of a session are transcribed one after the other, so their texts come in
    order, and one session takes one place of the engine."""

    def __init__(
        self,
        item_id: str,
        service: TranscriptionService,
        settings: InputTranscription,
        listener: Listener,
        backlog: Backlog,
        after: Utterance | None,
    ) -> None:
        self.item_id = item_id
        self._service = service
        self._settings = settings
        self._listener = listener
        self._backlog = backlog
        self._pieces: asyncio.Queue[Samples | None] = asyncio.Queue()
        self._waiting = 0
        self._text = ""
        self._samples = 0
        self._task = asyncio.create_task(self._run(None if after is None else after._task))
        self._task.add_done_callback(self._clean_up)

    @property
    def task(self) -> asyncio.Task[None]:
        return self._task

    @property
    def done(self) -> bool:
        return self._task.done()

    def add(self, samples: Samples) -> None:
        self._waiting += len(samples)
        self._samples += len(samples)
        self._backlog.change(len(samples))
        self._pieces.put_nowait(samples)

    def end(self) -> None:
        """No more pieces come."""
        self._pieces.put_nowait(None)

    def cancel(self) -> None:
        self._task.cancel()

    async def wait(self) -> None:
        """Returns once the text is known, or never will be."""
        if not self._task.done():
            await asyncio.wait([self._task])

    async def _run(self, before: asyncio.Task[None] | None) -> None:
        if before is not None and not before.done():
            await asyncio.wait([before])
        del before
        try:
            while (piece := await self._pieces.get()) is not None:
                await self._transcribe(piece)
                self._forget(len(piece))
        except MillstreamError as error:
            self._listener.misheard(self.item_id, error)
        except Exception as error:  # a defect ends this phrase, not the session
            log.error("a phrase of a realtime session failed", exc_info=error)
            self._listener.misheard(self.item_id, MillstreamError(DEFECT))
        else:
            self._listener.understood(self.item_id, self._text.strip(), self._samples / SPEECH_RATE)

    async def _transcribe(self, samples: Samples) -> None:
        prompt = " ".join(filter(None, (self._settings.prompt, self._text[-PROMPT_CHARS:].strip()))) or None
        request = TranscriptionRequest(self._settings.model, samples, language=self._settings.language, prompt=prompt)
        transcription = await self._service.start(request)
        try:
            async for segment in transcription:
                self._hear(segment.text)
        finally:
            transcription.cancel()

    def _hear(self, text: str) -> None:
        text = text if self._text else text.lstrip()
        if text:
            self._text += text
            self._listener.heard(self.item_id, text)

    def _forget(self, samples: int) -> None:
        self._waiting -= samples
        self._backlog.change(-samples)

    def _clean_up(self, _: asyncio.Task[None]) -> None:
        """However it ended: pieces that nobody will transcribe hold back no other audio."""
        self._forget(self._waiting)
