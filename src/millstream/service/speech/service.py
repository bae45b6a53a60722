"""Speaks texts: prepares them on the pool, runs them on the model's engine."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
from collections.abc import Sequence
from concurrent.futures import Executor

from millstream.engine.speech.messages import Speak
from millstream.errors import BadRequest, EngineGone
from millstream.model_facts import SpeechFacts
from millstream.service.hub import ModelHub
from millstream.service.speech.model import SpeechModel
from millstream.service.speech.timing import SpeechTimer, SpeechTimers
from millstream.service.speech.utterance import AHEAD, Lines, Utterance
from millstream.service.unread_output import UnreadOutput
from millstream.speech_types import SpeechRequest, Voice

log = logging.getLogger(__name__)

MAX_TEXT = 200_000
"""Characters of a text: about four hours of speech."""
SPEEDS = (0.25, 4.0)
MAX_SOUND_BYTES = 64 * 2**20
"""Sound of a request that may wait for the event loop. What is spoken ahead stays far below it."""


class TextSpeaker:
    """Implements `ports.SpeechService`."""

    def __init__(self, hub: ModelHub, pool: Executor, timers: SpeechTimers) -> None:
        self._hub = hub
        self._pool = pool
        self._timers = timers
        self._unread = UnreadOutput(MAX_SOUND_BYTES)
        self._ids = itertools.count(1)

    async def start(self, request: SpeechRequest) -> Utterance:
        with self._timers.open(request.model) as timer:
            _check(request)
            return await self._start(request, timer)

    async def voices(self, model: str) -> Sequence[Voice]:
        async with self._hub.use(model, SpeechModel) as found:
            return found.facts.voices

    async def _start(self, request: SpeechRequest, timer: SpeechTimer) -> Utterance:
        """Has a text prepared and accepted, again if the engine ends before it has accepted it."""
        while True:
            async with self._hub.use(request.model, SpeechModel) as model:
                timer.found(model.name)
                _check_abilities(request, model.facts)
                model.engine.admission.check(1)  # before anything is prepared for nothing
                script = await asyncio.get_running_loop().run_in_executor(
                    self._pool,
                    functools.partial(model.writer.write, request.text, voice=request.voice, language=request.language),
                )
                lines = Lines(script.lines, self._pool, model.facts.vocab_size)
                pieces = await lines.take(AHEAD)
                if not pieces:
                    raise BadRequest("nothing in the text can be spoken: it has no words or numbers", param="input")
                timer.submitted(lines.size)
                speak = Speak(
                    next(self._ids),
                    pieces,
                    script.voice,
                    request.speed,
                    script.language,
                    request.instructions,
                    lines.more,
                )
                try:
                    return Utterance(
                        model.name, model.facts.sample_rate, model.engine, speak, lines, self._unread, timer
                    )
                except EngineGone:
                    log.debug("%s: the engine ended before the request was submitted", model.name)
            # Nothing has run, so try again. Once the hub knows, it restarts the engine or raises the reason why not.
            await model.engine.wait_gone()


def _check_abilities(request: SpeechRequest, facts: SpeechFacts) -> None:
    """Instructions for a model that takes none are ignored, as by OpenAI's older models."""
    if request.speed != 1 and not facts.takes_speed:
        raise BadRequest("this model speaks at its own speed: speed must be 1", param="speed")
    if facts.needs_instructions and not (request.instructions or "").strip():
        raise BadRequest(
            "this model makes a voice from a description: say in `instructions` what it is like", param="instructions"
        )


def _check(request: SpeechRequest) -> None:
    if not request.text.strip():
        raise BadRequest("the text to speak is empty", param="input")
    if len(request.text) > MAX_TEXT:
        raise BadRequest(
            f"the text has {len(request.text)} characters; at most {MAX_TEXT} can be spoken at once. Send it in parts.",
            param="input",
        )
    slowest, fastest = SPEEDS
    if not (math.isfinite(request.speed) and slowest <= request.speed <= fastest):
        raise BadRequest(f"speed is {request.speed}; it must be from {slowest} to {fastest}", param="speed")
