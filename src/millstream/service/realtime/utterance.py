"""Transcribes one phrase, piece by piece as it is spoken."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from millstream.errors import MillstreamError
from millstream.realtime_types import InputTranscription
from millstream.service.ports import TranscriptionService
from millstream.speech_types import SPEECH_RATE, Samples, TranscriptionRequest

log = logging.getLogger(__name__)

SLOW_SECONDS = 2.0
"""If the last transcription took longer, nothing is guessed: it would gain little, and keep a busy engine busy."""
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
    """Audio of a session that is not transcribed yet, in samples, and how fast that goes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._samples = 0
        self.seconds = 0.0
        """That the last transcription took."""
        self._changed = asyncio.Event()

    def change(self, samples: int) -> None:
        self._samples += samples
        self._changed.set()

    async def room(self) -> None:
        """Returns once there is room for more audio."""
        while self._samples > self._most:
            self._changed.clear()
            await self._changed.wait()


class _Guess:
    """A transcription whose text is held back until it is known to be needed."""

    def __init__(self, texts: AsyncIterator[str]) -> None:
        self._told: asyncio.Queue[str | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._run(texts))
        self.task.add_done_callback(_retrieve)

    async def texts(self) -> AsyncIterator[str]:
        """Raises what the transcription raised."""
        while (text := await self._told.get()) is not None:
            yield text
        await self.task

    async def _run(self, texts: AsyncIterator[str]) -> None:
        try:
            async for text in texts:
                self._told.put_nowait(text)
        finally:
            self._told.put_nowait(None)


def _retrieve(task: asyncio.Task[None]) -> None:
    """The error of a guess that nobody needs is no defect."""
    if not task.cancelled():
        task.exception()


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
        self._pieces: asyncio.Queue[Samples | _Guess | None] = asyncio.Queue()
        self._guess: _Guess | None = None
        self._busy = True
        self._waiting = 0
        self._text = ""
        self._samples = 0
        self._dropped: list[asyncio.Task[None]] = []
        self._task: asyncio.Task[None] = asyncio.create_task(self._run(None if after is None else after.task))
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

    def guess(self, samples: Samples) -> None:
        """Begin with a piece that may be the last one. Nothing is told of it unless it is."""
        self.drop_guess()
        if not self._busy and self._pieces.empty() and self._backlog.seconds <= SLOW_SECONDS:
            self._guess = _Guess(self._texts(samples))

    def drop_guess(self) -> None:
        if self._guess is not None:
            self._guess.task.cancel()
            self._dropped = [*(task for task in self._dropped if not task.done()), self._guess.task]
            self._guess = None

    def end(self, samples: Samples, *, as_guessed: bool = False) -> None:
        """The last piece. `as_guessed`: it says no more than the last guess."""
        if as_guessed and self._guess is not None:
            self._samples += len(samples)
            self._pieces.put_nowait(self._guess)
        else:
            self.drop_guess()
            self.add(samples)
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
            await self._transcribe()
        except MillstreamError as error:
            self._listener.misheard(self.item_id, error)
        except Exception as error:  # a defect ends this phrase, not the session
            log.error("a phrase of a realtime session failed", exc_info=error)
            self._listener.misheard(self.item_id, MillstreamError(DEFECT))
        else:
            self._listener.understood(self.item_id, self._text.strip(), self._samples / SPEECH_RATE)
        finally:
            self.drop_guess()
            if self._dropped:
                await asyncio.wait(self._dropped)

    async def _transcribe(self) -> None:
        while True:
            self._busy = not self._pieces.empty()
            piece = await self._pieces.get()
            self._busy = True
            if piece is None:
                return
            if isinstance(piece, _Guess):
                async for text in piece.texts():
                    self._hear(text)
                continue
            async with contextlib.aclosing(self._texts(piece)) as texts:
                async for text in texts:
                    self._hear(text)
            self._forget(len(piece))

    async def _texts(self, samples: Samples) -> AsyncGenerator[str, None]:
        prompt = " ".join(filter(None, (self._settings.prompt, self._text[-PROMPT_CHARS:].strip()))) or None
        language = self._settings.language
        request = TranscriptionRequest(self._settings.model, samples, language=language, prompt=prompt, quick=True)
        started = time.monotonic()
        transcription = await self._service.start(request)
        try:
            async for segment in transcription:
                yield segment.text
            self._backlog.seconds = time.monotonic() - started
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
