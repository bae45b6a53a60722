"""Runs one request on a speech engine, and gives its samples as they come."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor

import numpy as np

from millstream.engine.messages import Failed, Started
from millstream.engine.speech.messages import Piece, Speak, SpeakMore, SpeechEnded, Spoken
from millstream.engine.token_ids import check_token_ids
from millstream.errors import MillstreamError
from millstream.service.engine_client import EngineClient
from millstream.service.inbox import failure
from millstream.service.speech.timing import SpeechTimer
from millstream.service.unread_output import UnreadOutput
from millstream.text.speech.script import Line
from millstream.types import Usage

AHEAD = 2
"""Pieces that the engine has before the reader has taken their sound."""
FLOAT_BYTES = 4


class Lines:
    """The lines of a script, prepared on the pool a few at a time."""

    def __init__(self, lines: Iterator[Line], pool: Executor, vocab_size: int) -> None:
        self._lines = lines
        self._pool = pool
        self._vocab_size = vocab_size
        self.more = True
        """False once the last line was taken."""
        self.size = 0
        """Of the lines that were taken."""

    async def take(self, count: int) -> tuple[Piece, ...]:
        """The next lines as pieces, fewer at the end of the text."""
        taken = await asyncio.get_running_loop().run_in_executor(self._pool, self._next, count)
        self.more = len(taken) == count
        self.size += sum(line.size for line in taken)
        return tuple(Piece(np.asarray(line.tokens, np.int32).tobytes(), line.text) for line in taken)

    def _next(self, count: int) -> Sequence[Line]:
        lines = list(itertools.islice(self._lines, count))
        for line in lines:
            check_token_ids(line.tokens, self._vocab_size, where="the text", param="input")
        return lines


class Utterance:
    """Implements `ports.Speech`."""

    def __init__(
        self, model: str, sample_rate: int, engine: EngineClient, speak: Speak, lines: Lines, unread: UnreadOutput,
        timer: SpeechTimer,
    ) -> None:  # fmt: skip
        """Raises `EngineBusy` or `EngineGone` if the engine does not accept it."""
        self._model = model
        self._sample_rate = sample_rate
        self._engine = engine
        self._request_id = speak.request_id
        self._lines = lines
        self._timer = timer
        self._inbox = engine.open_inbox([speak], unread, on_started=self._started)
        self._inbox.on_overflow(lambda: self._engine.cancel([self._request_id]))

    @property
    def model(self) -> str:
        return self._model

    @property
    def sample_rate(self) -> int:
        return self._sample_rate

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=self._lines.size)

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
                        if event.last and self._lines.more:
                            pieces = await self._lines.take(1)
                            self._engine.post(SpeakMore(self._request_id, pieces, self._lines.more))
                    case SpeechEnded():
                        self._end("finished")
                        return
                    case Failed():
                        raise failure(event)

    def _started(self, event: Started) -> None:
        self._timer.started()

    def _end(self, outcome: str, error: MillstreamError | None = None) -> None:
        """Safe at any time and more than once."""
        self._timer.ended(outcome, self.usage, error)
        self._engine.close_inbox([self._request_id], self._inbox)
