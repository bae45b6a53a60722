"""POST /v1/audio/speech and GET /v1/audio/voices over a real server, with a service that speaks tones."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import logging
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from millstream.api.app import create_app
from millstream.api.openai.audio import speech_response
from millstream.api.openai.audio.speech_response import SpeechStream
from millstream.api.openai.audio.speech_schema import MAX_INPUT, MAX_INSTRUCTIONS
from millstream.api.writer import ClientStalled
from millstream.errors import BadRequest, EngineBusy, StepFailed
from millstream.media.audio_encoding import FORMATS, MEDIA_TYPES, AudioEncoder, AudioFormat, open_encoder
from millstream.speech_types import SpeechRequest
from support.fake_speech import RATE, SENTENCES, FakeSpeechService
from support.heard import heard, level
from support.services import services

WAIT = 60
SPOKEN = np.concatenate([piece for piece in SENTENCES if not isinstance(piece, Exception)])


class Stage:
    """Delegates to the current test's service, so that one server serves all tests."""

    def __init__(self) -> None:
        self.service = FakeSpeechService()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)


@pytest.fixture(scope="module")
def speech_stage() -> Stage:
    return Stage()


@pytest.fixture(scope="module")
def speech_port(serve_module: Any, speech_stage: Stage) -> Iterator[int]:
    app = create_app(services(speech_stage), body_limit=1 << 20, ping_seconds=0.2)
    with serve_module(app, timeout_keep_alive=60) as port:
        yield port


@pytest.fixture
def speaker(speech_stage: Stage) -> FakeSpeechService:
    speech_stage.service = FakeSpeechService()
    return speech_stage.service


@pytest.fixture
def web(speech_port: int, speaker: FakeSpeechService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{speech_port}/v1/audio", timeout=WAIT) as client:
        yield client


@pytest.fixture
def official(speech_port: int, speaker: FakeSpeechService) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{speech_port}/v1"
    with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=WAIT) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = response.json()["error"]
    return found


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


# Formats


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("form", FORMATS)
def test_each_format(web: httpx.Client, form: AudioFormat, stream: bool) -> None:
    response = web.post("/speech", json={"input": "Hello.", "response_format": form, "stream": stream})
    assert response.status_code == 200
    assert response.headers["content-type"] == MEDIA_TYPES[form]
    assert ("content-length" in response.headers) is not stream
    assert response.headers["x-request-id"]
    made, rate = heard(response.content, form)
    assert len(made) / rate == pytest.approx(len(SPOKEN) / RATE, abs=0.11)
    assert level(made) == pytest.approx(level(SPOKEN), abs=1.5)


def test_mp3_is_the_default(web: httpx.Client) -> None:
    assert web.post("/speech", json={"input": "Hello."}).headers["content-type"] == "audio/mpeg"


def test_pcm_has_24_khz_whatever_the_model_has(web: httpx.Client, speaker: FakeSpeechService) -> None:
    speaker.rate = 16_000
    made = web.post("/speech", json={"input": "x", "response_format": "pcm"}).content
    assert len(made) == 2 * len(SPOKEN) * 24_000 // 16_000
    wav, rate = heard(web.post("/speech", json={"input": "x", "response_format": "wav"}).content, "wav")
    assert (len(wav), rate) == (len(SPOKEN), 16_000)


def test_a_sentence_is_sent_before_the_next_one_is_made(web: httpx.Client, speaker: FakeSpeechService) -> None:
    speaker.ends = False
    with web.stream("POST", "/speech", json={"input": "x", "response_format": "pcm"}) as response:
        received = 0
        for chunk in response.iter_raw():
            received += len(chunk)
            if received == 2 * len(SPOKEN):
                break
    speech = speaker.speeches.get(timeout=WAIT)
    assert speech.cancelled.wait(WAIT) and speech.left_early


def test_without_pyav(web: httpx.Client, speaker: FakeSpeechService, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "av" else find(name, *rest))
    response = web.post("/speech", json={"input": "x"})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("audio_format_unavailable", "response_format")
    assert "millstream[audio]" in error["message"]
    assert speaker.requests == []
    assert web.post("/speech", json={"input": "x", "response_format": "wav"}).status_code == 200


# Server-sent events


def test_events_hold_the_file(web: httpx.Client) -> None:
    body = {"input": "x", "response_format": "wav", "stream_format": "sse"}
    response = web.post("/speech", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *deltas, done = events(response.text)
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert done == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 11, "output_tokens": 7, "total_tokens": 18},
    }
    audio = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert audio == web.post("/speech", json=body | {"stream_format": "audio"}).content


def test_long_sentences_are_several_events(web: httpx.Client, speaker: FakeSpeechService) -> None:
    speaker.pieces = (np.zeros(100_000, np.float32),)
    body = {"input": "x", "response_format": "pcm", "stream_format": "sse"}
    *deltas, _ = events(web.post("/speech", json=body).text)
    sizes = [len(base64.b64decode(event["audio"])) for event in deltas]
    assert sum(sizes) == 200_000 and max(sizes) == speech_response.DELTA_BYTES


def test_events_keep_a_silent_connection_open(web: httpx.Client, speaker: FakeSpeechService) -> None:
    speaker.pieces, speaker.ends = (), False
    with web.stream("POST", "/speech", json={"input": "x", "stream_format": "sse"}) as response:
        assert next(line for line in response.iter_lines() if line) == ": ping"


# Requests


@pytest.mark.parametrize(
    "more, expected",
    [
        ({}, SpeechRequest("", "Hi")),
        ({"model": "voice", "voice": "af_heart"}, SpeechRequest("voice", "Hi", voice="af_heart")),
        ({"voice": {"id": "x"}}, SpeechRequest("", "Hi", voice="x")),
        ({"voice": {"name": "a+b"}}, SpeechRequest("", "Hi", voice="a+b")),
        ({"voice": ""}, SpeechRequest("", "Hi")),
        ({"voice": None, "speed": None, "instructions": " "}, SpeechRequest("", "Hi")),
        ({"speed": 2}, SpeechRequest("", "Hi", speed=2.0)),
        ({"speed": 0.25}, SpeechRequest("", "Hi", speed=0.25)),
        ({"language": "en-gb"}, SpeechRequest("", "Hi", language="en-gb")),
        ({"lang_code": "b"}, SpeechRequest("", "Hi", language="b")),
        ({"instructions": "Whisper."}, SpeechRequest("", "Hi", instructions="Whisper.")),
        ({"user": "me", "seed": 3, "volume_multiplier": 1.0, "return_download_link": False}, SpeechRequest("", "Hi")),
    ],
)
def test_what_the_service_gets(
    web: httpx.Client, speaker: FakeSpeechService, more: dict[str, Any], expected: SpeechRequest
) -> None:
    assert web.post("/speech", json={"input": "Hi", "response_format": "pcm"} | more).status_code == 200
    assert speaker.requests == [expected]


@pytest.mark.parametrize(
    "body, param, says",
    [
        ({}, "input", "required"),
        ({"input": ""}, "input", "empty"),
        ({"input": " \n"}, "input", "empty"),
        ({"input": 3}, "input", "must be a string"),
        ({"input": "x" * (MAX_INPUT + 1)}, "input", f"at most {MAX_INPUT}"),
        ({"input": "x", "voice": 3}, "voice", "name of a voice"),
        ({"input": "x", "voice": {"id": 3}}, "voice", "name of a voice"),
        ({"input": "x", "voice": "v" * 1000}, "voice", "at most 512"),
        ({"input": "x", "speed": 0.2}, "speed", "at least 0.25"),
        ({"input": "x", "speed": 4.5}, "speed", "at most 4"),
        ({"input": "x", "speed": "fast"}, "speed", "must be a number"),
        ({"input": "x", "response_format": "ogg"}, "response_format", "'mp3'"),
        ({"input": "x", "stream_format": "ndjson"}, "stream_format", "'audio' or 'sse'"),
        ({"input": "x", "instructions": "x" * (MAX_INSTRUCTIONS + 1)}, "instructions", "at most 4096 characters"),
        ({"input": "x", "ref_audio": "data:"}, "ref_audio", "not supported"),
        ({"input": "x", "response_formats": "wav"}, "response_formats", "Did you mean response_format?"),
    ],
)
def test_bad_requests(
    web: httpx.Client, speaker: FakeSpeechService, body: dict[str, Any], param: str, says: str
) -> None:
    response = web.post("/speech", json=body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param and says in error["message"], error
    assert speaker.requests == []


# Errors and clients that leave


@pytest.mark.parametrize("more", [{}, {"stream": False}, {"stream_format": "sse"}])
def test_a_refused_request_is_a_plain_error(
    web: httpx.Client, speaker: FakeSpeechService, more: dict[str, Any]
) -> None:
    speaker.start_error = BadRequest("There is no voice 'x'.", param="voice")
    response = web.post("/speech", json={"input": "x", "voice": "x"} | more)
    assert response.status_code == 400 and error_of(response)["param"] == "voice"
    speaker.start_error = EngineBusy("busy", active=4, waiting=9, retry_after=3)
    response = web.post("/speech", json={"input": "x"} | more)
    assert response.status_code == 503 and response.headers["retry-after"] == "3"


@pytest.mark.parametrize("more", [{}, {"stream": False}])
def test_a_failure_before_the_first_sentence_is_a_plain_error(
    web: httpx.Client, speaker: FakeSpeechService, more: dict[str, Any]
) -> None:
    speaker.pieces = (StepFailed("The model failed."),)
    response = web.post("/speech", json={"input": "x"} | more)
    assert response.status_code == 500
    assert error_of(response)["code"] == "engine_error"
    assert speaker.speeches.get(timeout=WAIT).cancelled.wait(WAIT)


@pytest.mark.parametrize("form", ["pcm", "mp3"])
def test_a_failure_in_the_middle_breaks_the_file_off(web: httpx.Client, speaker: FakeSpeechService, form: str) -> None:
    """Otherwise the client would take half of the speech for all of it."""
    speaker.pieces = (SENTENCES[0], StepFailed("The model failed."))
    with (
        pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"),
        web.stream("POST", "/speech", json={"input": "x", "response_format": form}) as response,
    ):
        assert response.status_code == 200
        received = b""
        for chunk in response.iter_raw():
            received += chunk
    assert received
    assert speaker.speeches.get(timeout=WAIT).cancelled.wait(WAIT)
    assert web.get("/voices").status_code == 200


def test_a_failure_in_the_middle_is_the_last_event(web: httpx.Client, speaker: FakeSpeechService) -> None:
    speaker.pieces = (SENTENCES[0], StepFailed("The model failed."))
    body = {"input": "x", "response_format": "pcm", "stream_format": "sse"}
    delta, error = events(web.post("/speech", json=body).text)
    assert delta["type"] == "speech.audio.delta"
    assert error["error"]["message"] == "The model failed."


@pytest.mark.parametrize("more", [{}, {"stream": False}, {"stream_format": "sse"}])
def test_a_client_that_leaves_cancels(
    speech_port: int, speaker: FakeSpeechService, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    speaker.ends = False
    body = json.dumps({"input": "x"} | more).encode()
    with socket.create_connection(("127.0.0.1", speech_port), timeout=WAIT) as line:
        head = f"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        line.sendall(head.encode() + body)
        speech = speaker.speeches.get(timeout=WAIT)
        assert speech.waiting.wait(WAIT) and not speech.cancelled.is_set()
    assert speech.cancelled.wait(WAIT) and speech.left_early
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


class Watched:
    """An encoder that tells when it is closed."""

    def __init__(self, encoder: AudioEncoder) -> None:
        self._encoder = encoder
        self.encode, self.finish = encoder.encode, encoder.finish
        self.closed = threading.Event()

    def close(self) -> None:
        self._encoder.close()
        self.closed.set()


@pytest.mark.parametrize("more", [{}, {"stream": False}, {"stream_format": "sse"}])
@pytest.mark.parametrize("end", ["whole", "left", "failed"])
def test_encoders_are_closed_however_it_ends(
    speech_port: int, speaker: FakeSpeechService, more: dict[str, Any], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has threads, which the garbage collector leaves running until it finds a cycle."""
    opened: queue.Queue[Watched] = queue.Queue()

    def watched(form: AudioFormat, rate: int, *, whole: bool) -> Watched:
        opened.put(Watched(open_encoder(form, rate, whole=whole)))
        return opened.queue[-1]

    monkeypatch.setattr(speech_response, "open_encoder", watched)
    speaker.ends = end != "left"
    if end == "failed":
        speaker.pieces = (*SENTENCES, StepFailed("no"))
    body = json.dumps({"input": "x", "response_format": "flac"} | more).encode()
    with socket.create_connection(("127.0.0.1", speech_port), timeout=WAIT) as line:
        line.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        encoder = opened.get(timeout=WAIT)
        if end == "left":
            assert speaker.speeches.get(timeout=WAIT).waiting.wait(WAIT) and not encoder.closed.is_set()
        else:
            assert encoder.closed.wait(WAIT)
    assert encoder.closed.wait(WAIT)


def test_a_client_that_does_not_read_stops_the_speech(speaker: FakeSpeechService) -> None:
    """Sentences are taken from the engine as the client reads, so what waits is bounded."""
    speaker.pieces = (SENTENCES[0],) * 50
    request = SpeechRequest("", "x")
    response = SpeechStream(speaker, request, "pcm", as_events=False, ping_seconds=15, write_timeout=0.2)
    accepted = 3

    async def send(message: Any) -> None:
        nonlocal accepted
        if not accepted:
            await asyncio.Event().wait()
        accepted -= 1

    async def receive() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(ClientStalled):
        asyncio.run(response({"type": "http"}, receive, send))  # type: ignore[arg-type]
    speech = speaker.speeches.get(timeout=WAIT)
    assert speech.cancelled.is_set() and speech.given < 5


def test_a_whole_file_has_a_limit(
    web: httpx.Client, speaker: FakeSpeechService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech_response, "MAX_WHOLE_SECONDS", 0.6)
    response = web.post("/speech", json={"input": "x", "stream": False})
    assert response.status_code == 400 and error_of(response)["param"] == "stream"
    assert speaker.speeches.get(timeout=WAIT).cancelled.wait(WAIT)
    assert web.post("/speech", json={"input": "x"}).status_code == 200


# Voices and models


def test_voices_as_open_webui_reads_them(web: httpx.Client) -> None:
    voices = web.get("/voices").json()["voices"]
    assert {voice["id"]: voice["name"] for voice in voices} == {"af_heart": "af_heart", "plain": "plain"}
    assert voices[0] == {
        "id": "af_heart",
        "name": "af_heart",
        "object": "voice",
        "language": "en-us",
        "gender": "female",
    }
    assert web.get("/voices", params={"model": "voice"}).json()["voices"] == voices


def test_voices_of_a_model_that_is_not_there(web: httpx.Client) -> None:
    response = web.get("/voices", params={"model": "nothing"})
    assert response.status_code == 404 and error_of(response)["param"] == "model"


def test_models_that_speak(web: httpx.Client) -> None:
    assert web.get("/models").json() == {"models": [{"id": "voice", "name": "voice"}]}


# The official client


def test_the_official_client_streams(official: openai.OpenAI, speaker: FakeSpeechService) -> None:
    with official.audio.speech.with_streaming_response.create(
        model="voice", input="Hello.", voice="alloy", response_format="pcm", speed=1.5, instructions="Calm."
    ) as response:
        received = b"".join(response.iter_bytes())
    assert len(received) == 2 * len(SPOKEN)
    assert speaker.requests == [SpeechRequest("voice", "Hello.", "alloy", 1.5, None, "Calm.")]


def test_the_official_client_gets_a_file_and_errors(official: openai.OpenAI, tmp_path: Any) -> None:
    speech = official.audio.speech.create(model="voice", input="Hello.", voice={"id": "x"}, response_format="flac")
    speech.write_to_file(tmp_path / "speech.flac")
    made, rate = heard((tmp_path / "speech.flac").read_bytes(), "flac")
    assert (len(made), rate) == (len(SPOKEN), RATE)
    with pytest.raises(openai.BadRequestError, match="speed must be at most 4"):
        official.audio.speech.create(model="voice", input="Hello.", voice="alloy", speed=9)
