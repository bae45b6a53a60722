"""Transcripts as responses: whole in one of five formats, or as server-sent events while segments come in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import orjson

from millstream.api.connected import ChunkedResponse, ComputedResponse
from millstream.api.errors import JSON_TYPE
from millstream.api.openai.audio.languages import language_name
from millstream.api.openai.audio.subtitles import srt, vtt
from millstream.api.openai.audio.transcription_schema import TranscriptionBody
from millstream.api.openai.errors import error_body
from millstream.api.sse import EVENT_STREAM, event
from millstream.api.stream import StreamFormat
from millstream.errors import MillstreamError
from millstream.service.ports import Transcription, TranscriptionService
from millstream.speech_types import Segment, TranscriptionRequest

TEXT_TYPE = "text/plain; charset=utf-8"
MANY = 500
"""Segments that are rendered on the event loop: some milliseconds."""


class Starter:
    """Starts one transcription, once. Then it drops the request, which may hold a large file, and `release` tells that
    its memory is free."""

    def __init__(
        self, service: TranscriptionService, request: TranscriptionRequest, release: Callable[[], None]
    ) -> None:
        self._service = service
        self._request: TranscriptionRequest | None = request
        self._release = release
        self.task = request.task

    async def start(self) -> Transcription:
        request, self._request = self._request, None
        assert request is not None
        transcription = await self._service.start(request)
        self._release()
        return transcription


class WholeTranscript(ComputedResponse):
    """The transcription starts, runs and ends in here. A client that leaves ends it."""

    def __init__(self, starter: Starter, body: TranscriptionBody, *, write_timeout: float) -> None:
        super().__init__(write_timeout=write_timeout)
        self.content_type = JSON_TYPE if body.response_format in ("json", "verbose_json") else TEXT_TYPE
        self._starter = starter
        self._format = body.response_format
        self._granularities = frozenset(body.timestamp_granularities or ("segment",))

    async def compute(self) -> bytes:
        transcription = await self._starter.start()
        try:
            segments = [segment async for segment in transcription]
        finally:
            transcription.cancel()
        render = partial(self._render, transcription, segments)
        return await self.on_thread(render) if len(segments) > MANY else render()

    def _render(self, transcription: Transcription, segments: Sequence[Segment]) -> bytes:
        match self._format:
            case "text":
                return f"{_joined(segments)}\n".encode()
            case "srt":
                return srt(segments).encode()
            case "vtt":
                return vtt(segments).encode()
            case "verbose_json":
                return orjson.dumps(verbose(transcription, segments, self._starter.task, self._granularities))
        usage = _duration(transcription)
        return orjson.dumps({"text": _joined(segments), **_languages(transcription), "usage": usage})


def verbose(
    transcription: Transcription, segments: Sequence[Segment], task: str, granularities: frozenset[str]
) -> dict[str, object]:
    language = transcription.language
    body: dict[str, object] = {
        "task": task,
        "language": "english" if task == "translate" else language_name(language or ""),
        "duration": round(transcription.duration, 3),
        "text": _joined(segments),
    }
    if "segment" in granularities:
        body["segments"] = [_segment_fields(number, segment) for number, segment in enumerate(segments)]
    if "word" in granularities:
        body["words"] = [
            {"word": word.text.strip(), "start": round(word.start, 3), "end": round(word.end, 3)}
            for segment in segments
            for word in segment.words
        ]
    return body | {"usage": _duration(transcription)}


class TranscriptStream(ChunkedResponse):
    """Events as OpenAI has them: a delta per segment, then the whole text. What was sent is never taken back."""

    def __init__(self, starter: Starter, body: TranscriptionBody, *, ping_seconds: float, write_timeout: float) -> None:
        super().__init__(ping_seconds=ping_seconds, write_timeout=write_timeout)
        self._starter = starter
        self._with_segments = body.response_format == "verbose_json"
        self._transcription: Transcription | None = None
        self._text = _GrowingText()

    @property
    def stream_format(self) -> StreamFormat:
        return EVENT_STREAM

    async def begin(self) -> None:
        self._transcription = await self._starter.start()

    async def chunks(self) -> AsyncIterator[bytes]:
        assert self._transcription is not None
        number = 0
        async for segment in self._transcription:
            chunk = b""
            if delta := self._text.add(segment.text):
                chunk = _event({"type": "transcript.text.delta", "delta": delta})
            if self._with_segments:
                chunk += _event(
                    {
                        "type": "transcript.text.segment",
                        "id": f"seg_{number:03}",
                        "start": round(segment.start, 3),
                        "end": round(segment.end, 3),
                        "text": segment.text,
                        "speaker": "",
                    }
                )
            number += 1
            if chunk:
                yield chunk

    def ending(self) -> bytes:
        assert self._transcription is not None
        usage = self._transcription.usage
        done = {
            "type": "transcript.text.done",
            "text": self._text.value,
            **_languages(self._transcription),
            "usage": {
                "type": "tokens",
                "input_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        return _event(done)

    def failure(self, error: MillstreamError) -> bytes:
        return event(error_body(error))

    def stop(self, outcome: str) -> None:
        if self._transcription is not None:
            self._transcription.cancel()


class _GrowingText:
    """Joins texts without white space at the begin or end, in pieces that are never taken back."""

    def __init__(self) -> None:
        self.value = ""
        self._space = ""
        """What may be the end of the text, or come before more of it."""

    def add(self, text: str) -> str:
        """What is new."""
        text = self._space + text if self.value else text.lstrip()
        words = text.rstrip()
        self._space = text[len(words) :] if self.value or words else ""
        self.value += words
        return words


def _joined(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments).strip()


def _segment_fields(number: int, segment: Segment) -> dict[str, object]:
    return {
        "id": number,
        "seek": round(segment.start * 100),
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def _duration(transcription: Transcription) -> dict[str, object]:
    return {"type": "duration", "seconds": round(transcription.duration, 3)}


def _languages(transcription: Transcription) -> dict[str, object]:
    return {} if transcription.language is None else {"languages": [{"code": transcription.language}]}


def _event(fields: dict[str, object]) -> bytes:
    return event(orjson.dumps(fields))
