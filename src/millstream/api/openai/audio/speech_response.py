"""Responses with speech: encoded on a thread, sentence by sentence, and sent as bytes or as server-sent events."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np
import orjson
from anyio import to_thread

from millstream.api.connected import ChunkedResponse, ComputedResponse
from millstream.api.openai.errors import error_body
from millstream.api.sse import EVENT_STREAM, event
from millstream.api.stream import StreamFormat
from millstream.errors import BadRequest, MillstreamError
from millstream.media.audio_encoding import MEDIA_TYPES, AudioEncoder, AudioFormat, open_encoder
from millstream.service.ports import Speech, SpeechService
from millstream.speech_types import Samples, SpeechRequest

T = TypeVar("T")

DELTA_BYTES = 48 * 1024
"""Of audio per event: some clients limit the length of a line."""
MAX_WHOLE_SECONDS = 1_800
"""The longest speech that is kept in memory until it is complete."""


class WholeSpeech(ComputedResponse):
    """Sent once it is complete, with its length."""

    def __init__(
        self, service: SpeechService, request: SpeechRequest, form: AudioFormat, *, write_timeout: float
    ) -> None:
        super().__init__(write_timeout=write_timeout)
        self.content_type = MEDIA_TYPES[form]
        self._service = service
        self._request = request
        self._form = form

    async def compute(self) -> bytes:
        speech = await self._service.start(self._request)
        pieces = AudioPieces(speech, self._form, whole=True)
        try:
            given = []
            async for piece in pieces:
                given.append(piece)
                if pieces.seconds > MAX_WHOLE_SECONDS:
                    raise BadRequest(
                        f"The speech is longer than {MAX_WHOLE_SECONDS} seconds, which is too much for stream false. "
                        "Leave stream out, to get it as it is made.",
                        param="stream",
                    )
            return b"".join(given)
        finally:
            speech.cancel()
            pieces.close()


class SpeechStream(ChunkedResponse):
    """Sent as it is made. `as_events`: as server-sent events, which can report an error in the middle."""

    def __init__(
        self,
        service: SpeechService,
        request: SpeechRequest,
        form: AudioFormat,
        *,
        as_events: bool,
        ping_seconds: float,
        write_timeout: float,
    ) -> None:
        super().__init__(ping_seconds=ping_seconds, write_timeout=write_timeout)
        self._service = service
        self._request = request
        self._form: AudioFormat = form
        self._as_events = as_events
        self._speech: Speech | None = None
        self._audio: AudioPieces | None = None

    @property
    def stream_format(self) -> StreamFormat:
        return EVENT_STREAM if self._as_events else StreamFormat(MEDIA_TYPES[self._form].encode())

    async def begin(self) -> None:
        self._speech = await self._service.start(self._request)
        self._audio = AudioPieces(self._speech, self._form)
        self._pieces = aiter(self._audio)
        # Audio cannot say that it failed, so the headers wait for the first sentence.
        self._first = b"" if self._as_events else await anext(self._pieces)

    async def chunks(self) -> AsyncIterator[bytes]:
        if self._first:
            yield self._first
        async for piece in self._pieces:
            if piece:
                yield await to_thread.run_sync(_deltas, piece) if self._as_events else piece

    def ending(self) -> bytes:
        if not self._as_events:
            return b""
        assert self._speech is not None
        usage = self._speech.usage
        done = {
            "type": "speech.audio.done",
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        return event(orjson.dumps(done))

    def failure(self, error: MillstreamError) -> bytes | None:
        return event(error_body(error)) if self._as_events else None

    def stop(self, outcome: str) -> None:
        if self._speech is not None:
            self._speech.cancel()
        if self._audio is not None:
            self._audio.close()


class AudioPieces:
    """The bytes of a file, at least one piece, as sentences are ready. Encodes on a thread. Whoever iterates it must
    `close` it in any case."""

    def __init__(self, speech: Speech, form: AudioFormat, *, whole: bool = False) -> None:
        self._speech = speech
        self._form = form
        self._whole = whole
        self.seconds = 0.0
        """Of speech so far."""
        self._encoder: AudioEncoder | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        rate = self._speech.sample_rate
        await _to_its_end(self._open, rate)
        async for samples in self._speech:
            self.seconds += len(samples) / 4 / rate
            yield await _to_its_end(self._encode, samples)
        yield await _to_its_end(self._finish)

    def close(self) -> None:
        """Closes the encoder, on a thread. Safe at any time when nothing iterates, and more than once."""
        encoder, self._encoder = self._encoder, None
        if encoder is not None:
            asyncio.get_running_loop().run_in_executor(None, encoder.close)

    def _open(self, rate: int) -> None:
        self._encoder = open_encoder(self._form, rate, whole=self._whole)

    def _encode(self, samples: bytes) -> bytes:
        assert self._encoder is not None
        floats: Samples = np.frombuffer(samples, np.float32)
        return self._encoder.encode(floats)

    def _finish(self) -> bytes:
        assert self._encoder is not None
        return self._encoder.finish()


async def _to_its_end(work: Callable[..., T], *arguments: object) -> T:
    """The result of work on a thread. If the caller is cancelled, it goes on when the work is done: an encoder must not
    be closed while it encodes."""
    task = asyncio.ensure_future(to_thread.run_sync(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        task.exception()  # so that asyncio does not log that nobody asked for it
        raise


def _deltas(audio: bytes) -> bytes:
    return b"".join(
        event(
            orjson.dumps(
                {
                    "type": "speech.audio.delta",
                    "audio": base64.b64encode(audio[start : start + DELTA_BYTES]).decode(),
                }
            )
        )
        for start in range(0, len(audio), DELTA_BYTES)
    )
