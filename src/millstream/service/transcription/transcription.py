"""One transcription: sends windows as there is room for them, and gives segments in the order of the audio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from millstream.engine.messages import Failed, Started
from millstream.engine.transcription.messages import AddWindows, Options, Transcribe, Transcribed, Window, WindowText
from millstream.errors import MillstreamError
from millstream.media.silence import has_speech
from millstream.service.inbox import Inbox, failure
from millstream.service.transcription.model import TranscriptionModel
from millstream.service.transcription.pieces import Piece, Pieces
from millstream.service.transcription.timing import TranscriptionTimer
from millstream.service.unread_output import UnreadOutput
from millstream.speech_types import SPEECH_RATE, Samples, Segment
from millstream.types import Usage


class WindowedTranscription:
    """Implements `ports.Transcription`. The engine has one window until it begins, and then as many as it can run: a
    request in the queue takes little memory there."""

    def __init__(
        self,
        model: TranscriptionModel,
        samples: Samples,
        windows: Sequence[tuple[int, int]],
        options: Options,
        timer: TranscriptionTimer,
        pool: Executor,
        release: Callable[[], None],
    ) -> None:
        """`windows`: begin and end of each, in samples. `release` frees the memory of the samples."""
        self.model = model.name
        self.duration = len(samples) / SPEECH_RATE
        self.language = options.language
        self.usage = Usage()
        self._engine = model.engine
        self._most = model.facts.max_rows + model.facts.start_windows
        self._samples = samples
        self._pieces = Pieces(windows)
        self._options = options
        self._timer = timer
        self._pool = pool
        self._release = release
        self._request_id = 0
        self._inbox: Inbox | None = None

    def submit(self, request_id: int, unread: UnreadOutput) -> None:
        """Raises `EngineBusy` or `EngineGone` if the engine does not accept it."""
        first = self._pieces.send_next()
        if first is None:
            return  # nobody speaks
        submit = Transcribe(request_id, self._options, (self._window(first),), complete=False)
        self._inbox = self._engine.open_inbox([submit], unread, on_started=self._started)
        self._request_id = request_id

    async def __aiter__(self) -> AsyncIterator[Segment]:
        try:
            if self._inbox is not None:
                async for segment in self._segments(self._inbox):
                    yield segment
        except MillstreamError as error:
            self._timer.ended("failed", self.usage, error)
            raise
        except Exception:
            self._timer.ended("failed", self.usage, MillstreamError("The server failed on this request."))
            raise
        else:
            self._timer.ended("finished", self.usage)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Safe at any time and more than once."""
        self._timer.ended("cancelled", self.usage)
        if self._inbox is not None:
            self._engine.close_inbox([self._request_id], self._inbox)
        self._release()

    async def _segments(self, inbox: Inbox) -> AsyncIterator[Segment]:
        while True:
            for event in await inbox.take():
                match event:
                    case WindowText():
                        await self._heard(event)
                    case Transcribed():
                        return
                    case Failed():
                        raise failure(event)
                for segment in self._pieces.take_ready():
                    self._timer.delivered()
                    yield segment

    async def _heard(self, text: WindowText) -> None:
        self.language = self.language or text.language
        self.usage = Usage(
            self.usage.prompt_tokens + text.prompt_tokens, self.usage.completion_tokens + text.completion_tokens
        )
        seconds = self._pieces.seconds(text.index)
        rest = self._pieces.heard(text)
        if rest is not None and await self._has_speech(*rest):
            self._pieces.hear_again(*rest)
        self._timer.heard(text.consumed or seconds, text.prompt_tokens, text.completion_tokens)
        self._send()

    async def _has_speech(self, begin: int, end: int) -> bool:
        work = partial(has_speech, self._samples[begin:end], SPEECH_RATE)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _started(self, event: Started) -> None:
        self._timer.started()
        self._send()

    def _send(self) -> None:
        """Fills the engine with windows. The last command says that no more will come."""
        windows: list[Window] = []
        while self._pieces.in_engine < self._most and (piece := self._pieces.send_next()) is not None:
            windows.append(self._window(piece))
        complete = self._pieces.complete
        if windows or complete:
            self._engine.post(AddWindows(self._request_id, tuple(windows), complete))

    def _window(self, piece: Piece) -> Window:
        return Window(piece.index, self._samples[piece.begin : piece.end].tobytes())
