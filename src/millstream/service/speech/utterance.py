"""Runs one request on a speech engine, and gives its samples as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator

from millstream.engine.messages import Failed, Started
from millstream.engine.speech.messages import Continue, Speak, SpeechEnded, Spoken
from millstream.errors import BadRequest, EngineGone, MillstreamError, OutputUnread, StepFailed
from millstream.service.engine_client import EngineClient
from millstream.service.inbox import Inbox
from millstream.service.speech.timing import SpeechTimer
from millstream.service.unread_output import UnreadOutput
from millstream.types import Usage

FLOAT_BYTES = 4


class Utterance:
    """Implements `ports.Speech`. The engine speaks a bounded number of pieces ahead of the reader."""

    def __init__(
        self, model: str, sample_rate: int, engine: EngineClient, speak: Speak, tokens: int, unread: UnreadOutput,
        timer: SpeechTimer,
    ) -> None:  # fmt: skip
        """Raises `EngineBusy` or `EngineGone` if the engine does not accept it."""
        self._model = model
        self._sample_rate = sample_rate
        self._engine = engine
        self._request_id = speak.request_id
        self._usage = Usage(prompt_tokens=tokens)
        self._timer = timer
        self._inbox = Inbox(unread)
        self._inbox.on_started = self._started
        self._inbox.on_overflow(lambda: self._engine.cancel([self._request_id]))
        try:
            engine.submit([speak], self._inbox)
        except BaseException:
            self._inbox.close()
            raise

    @property
    def model(self) -> str:
        return self._model

    @property
    def sample_rate(self) -> int:
        return self._sample_rate

    @property
    def usage(self) -> Usage:
        return self._usage

    def cancel(self) -> None:
        self._end("cancelled")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for samples in self._samples():
                yield samples
        except MillstreamError as error:
            self._end("failed", error)
            raise
        finally:
            self._end("cancelled")  # unless it has ended: the reader left

    async def _samples(self) -> AsyncIterator[bytes]:
        while True:
            for event in await self._inbox.take():
                match event:
                    case Spoken():
                        if event.samples:
                            self._timer.delivered(len(event.samples) / FLOAT_BYTES / self._sample_rate)
                            yield event.samples
                        if event.last:
                            self._engine.post(Continue(self._request_id))
                    case SpeechEnded():
                        self._end("finished")
                        return
                    case Failed():
                        if event.refused:
                            raise BadRequest(event.message)
                        raise EngineGone(event.message) if event.gone else StepFailed(event.message)

    def _started(self, event: Started) -> None:
        self._timer.started()

    def _end(self, outcome: str, error: MillstreamError | None = None) -> None:
        """Safe at any time and more than once."""
        self._timer.ended(outcome, error)
        self._engine.cancel([self._request_id])
        if not isinstance(error, OutputUnread):
            self._inbox.close()
