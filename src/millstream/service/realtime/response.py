"""One response: from the prompt to text, speech and calls, as events. It can be stopped at any moment, at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import numpy as np

from millstream.errors import ContextOverflow, MillstreamError
from millstream.media.raw_audio import RawEncoder, bytes_per_second
from millstream.realtime_types import Item, Response, ResponseCreated, ResponseDone, ResponseOptions, Status
from millstream.service.ports import Generation, GenerationService, Outbox, SpeechService
from millstream.service.realtime.conversation import Conversation, messages_of, new_id
from millstream.service.realtime.output import OutputItems
from millstream.service.realtime.sentences import SentenceSplitter
from millstream.speech_types import SpeechRequest
from millstream.types import (
    SAMPLING_FIELDS,
    CallDelta,
    ChatPrompt,
    FinishReason,
    GenerationRequest,
    Sampling,
    Thinking,
    Usage,
)

log = logging.getLogger(__name__)

AUDIO_SECONDS = 0.5
"""Of audio in one event, at most. A sentence that comes as a whole is sent in pieces."""
TEMPERATURE = 0.8
"""OpenAI's default for realtime sessions."""
DEFECT = "The server failed on this response."


class ResponseRun:
    """Runs as a task of its own. `stop` ends it for the client and for the conversation before it returns; the work
    behind it is cancelled at the same time."""

    def __init__(
        self,
        options: ResponseOptions,
        conversation: Conversation,
        generation: GenerationService,
        speech: SpeechService,
        outbox: Outbox,
        *,
        ready: Callable[[], Awaitable[None]],
        ended: Callable[[ResponseRun], None],
    ) -> None:
        """`ready` returns once the prompt is complete: what was said before is transcribed. `ended` is called once,
        when the client has been told the end."""
        self.response = Response(new_id("resp"), options)
        self._conversation = conversation
        self._generations = generation
        self._speech = speech
        self._outbox = outbox
        self._ready = ready
        self._ended = ended
        self._generation: Generation | None = None
        self.output = OutputItems(self.response.id, options, conversation, outbox)
        self._sentences: asyncio.Queue[str | None] = asyncio.Queue()
        outbox.put(ResponseCreated(self.response))
        self.task = asyncio.create_task(self._run())

    @property
    def over(self) -> bool:
        return self.response.status != "in_progress"

    def stop(self, reason: str) -> None:
        """Cancel the response. Nothing more of it is sent after this, and the conversation holds what was said."""
        self._finish("cancelled", reason)
        self.task.cancel()

    def _finish(self, status: Status, reason: str | None = None, error: MillstreamError | None = None) -> None:
        if self.over:
            return
        self.output.close("completed" if status == "completed" else "incomplete")
        usage = Usage() if self._generation is None else self._generation.usage
        self.response = replace(
            self.response, status=status, reason=reason, error=error, output=self.output.items, usage=usage
        )
        self._outbox.put(ResponseDone(self.response))
        self._ended(self)

    async def _run(self) -> None:
        try:
            await self._ready()
            finish = await self._respond()
        except MillstreamError as error:
            self._finish("failed", error=error)
        except Exception as error:  # a defect ends this response, not the session
            log.error("a response of a realtime session failed", exc_info=error)
            self._finish("failed", error=MillstreamError(DEFECT))
        else:
            cut = finish is FinishReason.LENGTH
            self._finish("incomplete" if cut else "completed", "max_output_tokens" if cut else None)

    async def _respond(self) -> FinishReason | None:
        self._generation = generation = await self._start()
        try:
            if not self.response.options.config.speaks:
                return await self._write(generation, None)
            speaker = asyncio.create_task(self._speak())
            try:
                finish = await self._write(generation, speaker)
                await speaker
                return finish
            finally:
                speaker.cancel()
                await asyncio.wait([speaker])
        finally:
            generation.cancel()

    async def _start(self) -> Generation:
        """Leaves out the oldest items, a quarter at a time, while the prompt is too long."""
        options = self.response.options
        items = self._conversation.items if options.input is None else options.input
        while True:
            try:
                return await self._generations.start(generation_request(options, items))
            except ContextOverflow:
                shorter = _without_oldest(items)
                if not options.config.truncates or not shorter:
                    raise
                items = shorter

    async def _write(self, generation: Generation, speaker: asyncio.Task[None] | None) -> FinishReason | None:
        """Sends the text as it comes. A speaker that failed ends it."""
        splitter, calls = SentenceSplitter(), _Calls()
        finish = None
        async for batch in generation:
            for delta in batch:
                if delta.text:
                    self.output.write(delta.text)
                    self._say(splitter.feed(delta.text))
                calls.add(delta.calls)
                finish = delta.finish_reason or finish
            if speaker is not None and speaker.done():
                break
            await self._outbox.room()
        self._say([splitter.flush()])
        self._sentences.put_nowait(None)
        if speaker is not None:
            await asyncio.wait([speaker])  # the message ends before the calls, and with its audio
            if speaker.exception() is not None:
                return finish
        for call in calls.whole():
            self.output.add_call(call.id or new_id("call"), call.name, call.arguments)
        return finish

    def _say(self, sentences: list[str]) -> None:
        for sentence in sentences:
            self._sentences.put_nowait(sentence)

    async def _speak(self) -> None:
        """Speaks sentence after sentence, each as soon as it is written."""
        config = self.response.options.config
        while (text := await self._sentences.get()) is not None:
            self.output.begin_sentence(text)
            if not any(char.isalnum() for char in text):
                continue
            request = SpeechRequest(config.speech_model, text.strip(), voice=config.voice, speed=config.speed)
            speech = await self._speech.start(request)
            try:
                encoder = RawEncoder(speech.sample_rate, config.output_format.encoding, config.output_format.rate)
                step = int(AUDIO_SECONDS * speech.sample_rate)
                async for piece in speech:
                    samples = np.frombuffer(piece, np.float32)
                    for start in range(0, len(samples), step):
                        await self._send_audio(encoder.feed(samples[start : start + step]))
                await self._send_audio(encoder.flush())
            finally:
                speech.cancel()

    async def _send_audio(self, audio: bytes) -> None:
        if audio:
            form = self.response.options.config.output_format
            self.output.add_audio(audio, 1000 * len(audio) / bytes_per_second(form.encoding, form.rate))
        await asyncio.sleep(0)  # encoding the next piece takes time, too
        await self._outbox.room()


def generation_request(options: ResponseOptions, items: tuple[Item, ...]) -> GenerationRequest:
    config = options.config
    given = {"temperature"} if config.temperature is not None else set()
    return GenerationRequest(
        model=config.model,
        prompts=(ChatPrompt(messages_of(items, config.instructions)),),
        sampling=Sampling(temperature=TEMPERATURE if config.temperature is None else config.temperature),
        max_tokens=config.max_output_tokens,
        tools=config.tool_use,
        thinking=Thinking(config.effort),
        unset=SAMPLING_FIELDS - given,
    )


def _without_oldest(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Empty if nothing would be left. An output whose call is gone goes with it."""
    items = items[max(1, len(items) // 4) :]
    while items and items[0].kind == "function_call_output":
        items = items[1:]
    return items


class _Calls:
    """Collects the parts of calls. One that turns out not to be valid is text, and was written as such."""

    def __init__(self) -> None:
        self._calls: dict[int, CallDelta] = {}

    def add(self, deltas: tuple[CallDelta, ...]) -> None:
        for delta in deltas:
            if delta.void:
                self._calls.pop(delta.index, None)
            elif (known := self._calls.get(delta.index)) is None:
                self._calls[delta.index] = delta
            else:
                self._calls[delta.index] = replace(known, arguments=known.arguments + delta.arguments)

    def whole(self) -> Iterator[CallDelta]:
        yield from self._calls.values()
