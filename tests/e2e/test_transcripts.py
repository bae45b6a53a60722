"""Transcription over HTTP with the official client, Whisper tiny.en and a real recording."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest

from millstream.config import Settings
from support.audio_files import tone, wav
from support.real_whisper import tiny_en
from support.recording import JFK_WORDS, jfk_samples, jfk_wav
from support.server import RunningServer, running
from support.spoken import hum, noise, pause
from support.subtitle_parser import parse_srt, parse_vtt
from support.tiny import write_servable

__all__ = ["tiny_en"]

MODEL = "whisper-tiny.en"


@pytest.fixture(scope="module")
def server(tiny_en: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A chat model comes first: requests that name no model get the one that transcribes."""
    models = (str(write_servable(tmp_path_factory.mktemp("transcripts") / "chat")), str(tiny_en))
    settings = Settings(models, port=0, isolation="thread", audio_bytes=2**20, audio_seconds=60, media_timeout=20)
    with running(settings) as subject:
        yield subject


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/v1/audio", timeout=300) as made:
        yield made


def words(text: str) -> str:
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def encoded(samples: Any, kind: str, codec: str, rate: int = 16_000) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[np.newaxis]), format="fltp", layout="mono")
        frame.rate = 16_000
        resampler = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=rate)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode())
    return buffer.getvalue()


def test_every_way_at_once_gives_the_text_of_one_alone(client: openai.OpenAI, http: httpx.Client) -> None:
    create = client.audio.transcriptions.create
    recording = jfk_wav()
    alone = create(
        file=recording, model=MODEL, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    text = alone.text
    assert words(text) == JFK_WORDS
    assert alone.duration == 11.0 and alone.language == "english"
    assert alone.segments is not None and alone.words is not None
    assert "".join(segment.text for segment in alone.segments).strip() == text
    assert words(" ".join(word.word for word in alone.words)) == JFK_WORDS
    times = [time for word in alone.words for time in (word.start, word.end)]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= 11.0

    def streamed() -> str:
        events = list(create(file=recording, model=MODEL, stream=True))
        joined = "".join(event.delta for event in events if event.type == "transcript.text.delta")
        assert events[-1].type == "transcript.text.done" and events[-1].text == joined
        return joined

    def subtitles(form: Any, parse: Callable[[str], list[tuple[float, float, str]]]) -> str:
        cues = parse(create(file=recording, model=MODEL, response_format=form))
        assert all(0 <= start < end <= 11.0 for start, end, _ in cues)
        return " ".join(cue for _, _, cue in cues)

    def of_address() -> str:
        uri = "data:audio/wav;base64," + base64.b64encode(recording).decode()
        return str(http.post("/transcriptions", json={"file": uri}).json()["text"])

    def of_a_form() -> str:
        """As Open WebUI sends it: a file with a name and a type, and the model."""
        form = {"file": ("recording.webm", encoded(jfk_samples(), "webm", "libopus", 48_000), "audio/webm")}
        response = http.post("/transcriptions", files=form, data={"model": MODEL, "language": "en"})
        assert words(response.json()["text"]) == JFK_WORDS
        return text

    ways: list[Callable[[], str]] = [
        lambda: create(file=recording, model=MODEL).text,
        lambda: create(file=recording, model=MODEL, response_format="text").removesuffix("\n"),
        lambda: create(file=recording, model=MODEL, response_format="verbose_json").text,
        lambda: subtitles("srt", parse_srt),
        lambda: subtitles("vtt", parse_vtt),
        streamed,
        of_address,
        of_a_form,
    ]
    with ThreadPoolExecutor(len(ways)) as pool:
        assert [done.result(300) for done in [pool.submit(way) for way in ways]] == [text] * len(ways)


@pytest.mark.parametrize("name", ["silence", "noise", "hum"])
def test_nothing_is_invented(client: openai.OpenAI, name: str) -> None:
    audio = {"silence": pause(20), "noise": noise(20, 0.1), "hum": hum(20, 50)}[name]
    whole = client.audio.transcriptions.create(file=wav(audio), model=MODEL, response_format="verbose_json")
    assert (whole.text, whole.segments, whole.duration) == ("", [], 20.0)
    events = list(client.audio.transcriptions.create(file=wav(audio), model=MODEL, stream=True))
    assert [event.type for event in events] == ["transcript.text.done"] and events[0].text == ""


SHORT = tone(440, 1)
BAD = {
    "empty": (b"", "file is empty"),
    "a text": (b"hello, this is no audio", "not audio in a supported format"),
    "an image": (b"\x89PNG\r\n\x1a\n" + bytes(99), "not audio in a supported format"),
    "a truncated WAV": (wav(SHORT)[:-500], "truncated"),
    "a WAV of no samples": (wav(SHORT[:0]), "has no samples"),
    "a WAV of 4 GB, it says": (wav(SHORT)[:70].replace(b"data", b"data\xff\xff\xff\xff"), "truncated"),
    "a damaged Ogg file": (b"OggS" + bytes(200), "damaged"),
    "too long": (wav(np.zeros(61 * 8_000), 8_000, bits=8), "at most 60 s (--audio-seconds)"),
    "too long, compressed": (encoded(pause(70), "flac", "flac"), "at most 60 s (--audio-seconds)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(http: httpx.Client, name: str) -> None:
    data, said = BAD[name]
    for stream in ("false", "true"):
        response = http.post("/transcriptions", files={"file": ("a.wav", data)}, data={"stream": stream})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "file" and said in error["message"], error


def test_files_that_are_too_large_and_addresses_that_are_not_allowed(http: httpx.Client, server: RunningServer) -> None:
    response = http.post("/transcriptions", files={"file": bytes(2 * 2**20)})
    assert response.status_code == 413 and "--audio-bytes" in response.json()["error"]["message"]
    for address, said in {
        f"{server.url}/health": "not a public address",
        "/etc/passwd": "reads no local files",
    }.items():
        error = http.post("/transcriptions", json={"file": address}).json()["error"]
        assert error["code"] == "invalid_media" and said in error["message"]


def test_models_that_do_something_else(http: httpx.Client, client: openai.OpenAI) -> None:
    file = {"file": wav(SHORT)}
    error = http.post("/transcriptions", files=file, data={"model": "chat"}).json()["error"]
    assert error["code"] == "wrong_model_kind"
    assert http.post("/transcriptions", files=file, data={"model": "nobody"}).status_code == 404
    error = http.post("/translations", files=file).json()["error"]
    assert "cannot translate" in error["message"]
    with pytest.raises(openai.BadRequestError, match="is a model for transcription"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])


def test_the_request_is_in_the_journal(http: httpx.Client, server: RunningServer) -> None:
    response = http.post("/transcriptions", files={"file": wav(pause(2))})
    ended = httpx.get(f"{server.url}/server/requests", timeout=60).json()["recent"]
    (found,) = [each for each in ended if each["id"] == response.headers["x-request-id"]]
    assert (found["model"], found["endpoint"], found["state"]) == (MODEL, "/v1/audio/transcriptions", "done")


def test_models_tell_that_they_transcribe(client: openai.OpenAI) -> None:
    card = client.models.retrieve(MODEL)
    assert "transcription" in card.capabilities  # type: ignore[attr-defined]
