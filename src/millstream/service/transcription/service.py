"""Transcribes audio: decodes it, cuts it at silences, and runs its windows on the model's engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import Executor

from millstream.errors import EngineGone
from millstream.media.silence import cut
from millstream.service.hub import ModelHub
from millstream.service.media.audio_files import AudioFiles, DecodedAudio
from millstream.service.transcription.model import TranscriptionModel
from millstream.service.transcription.options import options_of
from millstream.service.transcription.timing import TranscriptionTimer, TranscriptionTimers
from millstream.service.transcription.transcription import WindowedTranscription
from millstream.service.unread_output import UnreadOutput
from millstream.speech_types import SPEECH_RATE, Samples, TranscriptionRequest

log = logging.getLogger(__name__)


class Transcriber:
    """Implements `ports.TranscriptionService`."""

    def __init__(
        self, hub: ModelHub, pool: Executor, audio: AudioFiles, unread: UnreadOutput, timers: TranscriptionTimers
    ) -> None:
        self._hub = hub
        self._pool = pool
        self._audio = audio
        self._unread = unread
        self._timers = timers
        self._ids = itertools.count(1)

    async def start(self, request: TranscriptionRequest) -> WindowedTranscription:
        audio: DecodedAudio | None = None
        try:
            with self._timers.open(request.model) as timer:
                while True:
                    async with self._hub.use(request.model, TranscriptionModel) as model:
                        timer.found(model.name)
                        model.engine.admission.check(1)  # before anything is decoded for nothing
                        options_of(request, model.name, model.facts)
                        audio = audio or await self._audio.decode(request.audio)
                        try:
                            return await self._submit(request, model, audio, timer)
                        except EngineGone:
                            log.debug("%s: the engine ended before the request was submitted", model.name)
                    # Nothing has run, so try again. Once the hub knows, it restarts the engine or says why not.
                    await model.engine.wait_gone()
        except BaseException:
            if audio is not None:
                audio.release()
            raise

    async def _submit(
        self,
        request: TranscriptionRequest,
        model: TranscriptionModel,
        audio: DecodedAudio,
        timer: TranscriptionTimer,
    ) -> WindowedTranscription:
        windows = await self._cut(audio.samples, model.facts.window_seconds)
        options = options_of(request, model.name, model.facts)
        transcription = WindowedTranscription(model, audio.samples, windows, options, timer, self._pool, audio.release)
        timer.submitted()
        transcription.submit(next(self._ids), self._unread)
        return transcription

    async def _cut(self, samples: Samples, longest: float) -> Sequence[tuple[int, int]]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: cut(samples, SPEECH_RATE, longest))
