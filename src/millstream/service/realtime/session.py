"""A realtime session: audio and requests in, events out. Everything that it started ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from anyio import to_thread

from millstream.errors import BadRequest, MillstreamError, NoActiveResponse, ResponseActive, SessionStateError
from millstream.media.raw_audio import RawDecoder
from millstream.realtime_types import (
    BufferCleared,
    BufferCommitted,
    InputTranscriptCompleted,
    InputTranscriptDelta,
    InputTranscriptFailed,
    InputTranscription,
    Item,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemRetrieved,
    ItemTruncated,
    Part,
    ResponseOptions,
    SessionConfig,
    SessionCreated,
    SessionError,
    SessionUpdated,
    SpeechStarted,
    SpeechStopped,
)
from millstream.service.ports import GenerationService, Outbox, SpeechService, TranscriptionService
from millstream.service.realtime.conversation import Conversation, new_id, with_transcript
from millstream.service.realtime.phrases import Began, Ended, Happening, Paused, PhraseFinder, Resumed, Spoken
from millstream.service.realtime.response import ResponseRun
from millstream.service.realtime.spoken import SpokenText
from millstream.service.realtime.utterance import Backlog, Utterance
from millstream.speech_types import SPEECH_RATE, Samples

SMALL = 32 * 1024
"""Bytes of audio that are decoded on the event loop: some milliseconds."""
MAX_BACKLOG = 120 * SPEECH_RATE
"""Samples that may wait for transcription. Beyond it, the session reads no more."""


@dataclass(frozen=True, slots=True)
class SessionServices:
    generation: GenerationService
    transcription: TranscriptionService
    speech: SpeechService


class Session:
    """Implements `ports.RealtimeSession`."""

    def __init__(
        self,
        config: SessionConfig,
        services: SessionServices,
        outbox: Outbox,
        *,
        closed: Callable[[Session], None] = lambda _: None,
    ) -> None:
        self.id = new_id("sess")
        self._config = config
        self._services = services
        self._outbox = outbox
        self._closed = closed
        self._conversation = Conversation()
        self._phrases = PhraseFinder(config.input_format, config.turn_detection)
        self._backlog = Backlog(MAX_BACKLOG)
        self._phrase: Utterance | None = None
        """The phrase that is being spoken."""
        self._utterances: dict[str, Utterance] = {}
        """Those that are not transcribed yet, in order, by item."""
        self._response: ResponseRun | None = None
        self._answerable: set[str] = set()
        """Phrases that get a response if they have words."""
        self._wanted = False
        """Respond once all phrases are transcribed and no response runs."""
        self._spoken: dict[str, SpokenText] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        outbox.put(SessionCreated(self.id, config))

    @property
    def config(self) -> SessionConfig:
        return self._config

    def update(self, config: SessionConfig) -> None:
        self._config = config
        self._handle(self._phrases.configure(config.input_format, config.turn_detection))
        self._outbox.put(SessionUpdated(self.id, config))

    async def close(self) -> None:
        self._closing, self._wanted = True, False
        self._closed(self)
        if self._response is not None:
            self._response.stop("client_cancelled")
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # Audio

    async def append(self, audio: bytes) -> None:
        self._check_transcriber()
        if len(audio) <= SMALL:
            happened = self._phrases.feed(audio)
        else:
            happened = await to_thread.run_sync(self._phrases.feed, audio)
        self._handle(happened)
        await self._backlog.room()

    def commit(self) -> None:
        self._check_transcriber()
        spoken = self._phrases.speaking
        happened = self._phrases.commit()
        if not spoken:
            self._phrase = self._utterance(new_id("item"))
        self._handle(happened, by_client=True)

    def clear(self) -> None:
        self._phrases.clear()
        if self._phrase is not None:
            self._phrase.cancel()
            self._phrase = None
        self._outbox.put(BufferCleared())

    def _handle(self, happened: Sequence[Happening], *, by_client: bool = False) -> None:
        for event in happened:
            match event:
                case Began(ms):
                    self._phrase = self._utterance(new_id("item"))
                    self._outbox.put(SpeechStarted(self._phrase.item_id, ms))
                    self._interrupt()
                case Spoken(samples):
                    assert self._phrase is not None
                    self._phrase.add(samples)
                case Paused(samples) if self._phrase is not None:
                    self._phrase.guess(samples)
                case Resumed() if self._phrase is not None:
                    self._phrase.drop_guess()
                case Ended():
                    self._end_phrase(event, None if by_client else event.ms)

    def _interrupt(self) -> None:
        """Somebody speaks: the voice stops."""
        turns = self._config.turn_detection
        if turns is None or not turns.interrupt_response:
            return
        if self._response is not None and self._response.response.options.in_conversation:
            self._response.stop("turn_detected")

    def _end_phrase(self, ended: Ended, stopped_ms: int | None) -> None:
        """`stopped_ms`: where the server found the end; None if the client committed."""
        phrase, self._phrase = self._phrase, None
        assert phrase is not None
        if stopped_ms is not None:
            self._outbox.put(SpeechStopped(phrase.item_id, stopped_ms))
        item = Item(phrase.item_id, parts=(Part("input_audio"),))
        self._conversation.make_room()
        previous = self._conversation.add(item)
        self._outbox.put(BufferCommitted(item.id, previous))
        self._outbox.put(ItemAdded(item, previous))
        self._outbox.put(ItemDone(item, previous))
        phrase.end(ended.samples, as_guessed=ended.as_paused)
        turns = self._config.turn_detection
        if stopped_ms is not None and turns is not None and turns.create_response and self._config.kind == "realtime":
            self._answerable.add(item.id)

    # Transcripts: `utterance.Listener`

    def heard(self, item_id: str, text: str) -> None:
        if self._config.transcription is not None:
            self._outbox.put(InputTranscriptDelta(item_id, text))

    def understood(self, item_id: str, text: str, seconds: float) -> None:
        if self._conversation.has(item_id):
            self._conversation.replace(with_transcript(self._conversation.get(item_id), text))
        if self._config.transcription is not None:
            self._outbox.put(InputTranscriptCompleted(item_id, text, seconds))
        self._wanted |= bool(text) and item_id in self._answerable

    def misheard(self, item_id: str, error: MillstreamError) -> None:
        if self._config.transcription is not None:
            self._outbox.put(InputTranscriptFailed(item_id, error))
        else:
            self._outbox.put(SessionError(error))

    def _utterance(self, item_id: str) -> Utterance:
        after = next(reversed(self._utterances.values()), None)
        settings = replace(self._config.transcription or InputTranscription(), model=self._config.transcriber)
        made = Utterance(item_id, self._services.transcription, settings, self, self._backlog, after)
        self._utterances[item_id] = made
        self._track(made.task, lambda: self._forget_utterance(item_id))
        return made

    def _forget_utterance(self, item_id: str) -> None:
        self._utterances.pop(item_id, None)
        self._answerable.discard(item_id)
        self._respond_if_wanted()

    def _check_transcriber(self) -> None:
        if not self._config.transcriber:
            raise BadRequest(
                "This server has no transcription model, so it cannot hear. Serve one beside the chat model, for "
                "example a Whisper model.",
                param="session.audio.input.transcription.model",
            )

    # Items

    async def create_item(self, item: Item, previous_item_id: str | None) -> None:
        item = item if item.id else replace(item, id=new_id("item"))
        sounds = [part.audio for part in item.parts if part.audio and part.text is None]
        if len(sounds) > 1:
            raise BadRequest("An item may have one part with audio.", param="item.content")
        item = replace(item, parts=tuple(replace(part, audio=b"") for part in item.parts))
        samples = await to_thread.run_sync(self._decode, sounds[0]) if sounds else None
        previous = self._conversation.add(item, previous_item_id)
        self._outbox.put(ItemAdded(item, previous))
        self._outbox.put(ItemDone(item, previous))
        if samples is not None:
            utterance = self._utterance(item.id)
            utterance.end(samples)

    def _decode(self, audio: bytes) -> Samples:
        self._check_transcriber()
        form = self._config.input_format
        return RawDecoder(form.encoding, form.rate, SPEECH_RATE).feed(audio)

    def delete_item(self, item_id: str) -> None:
        self._conversation.delete(item_id)
        self._spoken.pop(item_id, None)
        if (utterance := self._utterances.get(item_id)) is not None:
            utterance.cancel()
        self._outbox.put(ItemDeleted(item_id))

    def item(self, item_id: str) -> Item:
        return self._conversation.get(item_id)

    def retrieve_item(self, item_id: str) -> None:
        self._outbox.put(ItemRetrieved(self.item(item_id)))

    def truncate_item(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        item = self._conversation.get(item_id)
        if self._response is not None and self._response.output.spoken_id == item_id:
            self._response.stop("client_cancelled")
            item = self._conversation.get(item_id)
        spoken = self._spoken.get(item_id)
        if spoken is None or content_index != 0:
            raise BadRequest(
                "Only spoken answers of this session can be truncated, and content_index must be 0.", param="item_id"
            )
        if audio_end_ms > spoken.end_ms + 1:
            raise BadRequest(
                f"The audio of this item is {spoken.end_ms:.0f} ms long, which is less than {audio_end_ms} ms.",
                param="audio_end_ms",
            )
        part = Part("output_audio", spoken.heard_until(audio_end_ms))
        self._conversation.replace(replace(item, status="incomplete", parts=(part,)))
        self._outbox.put(ItemTruncated(item_id, content_index, audio_end_ms))

    # Responses

    def create_response(self, options: ResponseOptions) -> None:
        if options.config.kind == "transcription":
            raise SessionStateError("A transcription session has no responses.")
        if self._response is not None:
            raise ResponseActive(
                f"The response {self._response.response.id} is in progress. Wait for its end, or cancel it."
            )
        self._start_response(options)

    def cancel_response(self, response_id: str | None) -> None:
        running = self._response
        if running is None or response_id not in (None, running.response.id):
            raise NoActiveResponse("There is no such response in progress.")
        running.stop("client_cancelled")

    def _respond_if_wanted(self) -> None:
        if self._wanted and not self._utterances and self._response is None:
            self._start_response(ResponseOptions(self._config))

    def _start_response(self, options: ResponseOptions) -> None:
        self._wanted = False
        pending = [utterance for utterance in self._utterances.values() if utterance is not self._phrase]

        async def ready() -> None:
            for utterance in pending:
                await utterance.wait()

        services = self._services
        run = self._response = ResponseRun(
            options, self._conversation, services.generation, services.speech, self._outbox,
            ready=ready, ended=self._response_over,
        )  # fmt: skip
        self._track(run.task)

    def _response_over(self, run: ResponseRun) -> None:
        self._response = None
        if run.output.spoken_id and self._conversation.has(run.output.spoken_id):
            known = {item_id: spoken for item_id, spoken in self._spoken.items() if self._conversation.has(item_id)}
            self._spoken = known | {run.output.spoken_id: run.output.spoken}
        self._respond_if_wanted()

    # Tasks

    def _track(self, task: asyncio.Task[None], over: Callable[[], None] = lambda: None) -> None:
        self._tasks.add(task)

        def done(_: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not self._closing:
                over()

        task.add_done_callback(done)
