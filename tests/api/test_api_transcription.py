"""POST /v1/audio/transcriptions and /translations over a fake service: forms, formats, streams and errors."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from api.conftest import running
from millstream.api.app import create_app
from millstream.errors import EngineBusy, MediaRefused, StepFailed, WrongModelKind
from millstream.speech_types import Segment
from support.fake_transcription import SEGMENTS, TEXT, WAIT, FakeTranscriptions
from support.services import services
from support.subtitle_parser import parse_srt, parse_vtt

AUDIO = b"RIFF\0\0\0\0WAVE and so on"
CUES = [
    (0.0, 2.5, "And so, my fellow Americans,"),
    (3.25, 3661.042, "ask <not> & what --> your country"),
    (3663.0, 3664.5, "can do."),
]


class Current:
    """The service of the module's server: that of the test that runs."""

    def __init__(self) -> None:
        self.service = FakeTranscriptions()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)


@pytest.fixture(scope="module")
def current() -> Current:
    return Current()


@pytest.fixture(scope="module")
def port(current: Current) -> Iterator[int]:
    app = create_app(services(current), body_limit=20_000, upload_limit=4_000_000, ping_seconds=0.05, write_timeout=60)
    with running(app, timeout_keep_alive=60) as made:
        yield made


@pytest.fixture
def service(current: Current) -> FakeTranscriptions:
    current.service = FakeTranscriptions()
    return current.service


@pytest.fixture(scope="module")
def http(port: int) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1/audio", timeout=WAIT) as client:
        yield client


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as made:
        yield made


Post = Callable[..., httpx.Response]


@pytest.fixture
def post(http: httpx.Client, service: FakeTranscriptions) -> Post:
    def send(path: str = "/transcriptions", /, file: bytes = AUDIO, **fields: Any) -> httpx.Response:
        return http.post(path, files={"file": ("speech.wav", file)}, data=fields)

    return send


def error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_json(post: Post, service: FakeTranscriptions) -> None:
    response = post(model="mill")
    assert response.json() == {
        "text": TEXT,
        "languages": [{"code": "en"}],
        "usage": {"type": "duration", "seconds": 3665.0},
    }
    assert response.headers["content-type"] == "application/json" and "x-request-id" in response.headers
    (asked,) = service.requests
    assert (asked.model, asked.audio, asked.task, asked.words) == ("mill", AUDIO, "transcribe", False)
    assert asked.language is asked.prompt is asked.temperature is None
    assert service.transcription().cancelled.wait(WAIT)


def test_text(post: Post) -> None:
    response = post(response_format="text")
    assert response.text == TEXT + "\n"
    assert response.headers["content-type"] == "text/plain; charset=utf-8"


def test_subtitles_parse(post: Post) -> None:
    assert parse_srt(post(response_format="srt").text) == CUES
    assert parse_vtt(post(response_format="vtt").text) == CUES


def test_subtitles_of_silence(post: Post, service: FakeTranscriptions) -> None:
    service.steps = (None,)
    assert post(response_format="srt").text == ""
    assert parse_vtt(post(response_format="vtt").text) == []
    assert post().json()["text"] == ""
    assert post(response_format="text").text == "\n"


def test_verbose(post: Post, service: FakeTranscriptions) -> None:
    body = post(response_format="verbose_json").json()
    assert (body["task"], body["language"], body["duration"], body["text"]) == ("transcribe", "english", 3665.0, TEXT)
    assert body["segments"][0] == {
        "id": 0,
        "seek": 0,
        "start": 0.0,
        "end": 2.5,
        "text": " And so, my fellow Americans,",
        "tokens": [843, 523, 11],
        "temperature": 0.0,
        "avg_logprob": -0.25,
        "compression_ratio": 1.1,
        "no_speech_prob": 0.01,
    }
    assert [segment["id"] for segment in body["segments"]] == [0, 1, 2, 3]
    assert "words" not in body and not service.requests[0].words


@pytest.mark.parametrize("granularities", [["word"], ["word", "segment"]])
def test_words(http: httpx.Client, service: FakeTranscriptions, granularities: list[str]) -> None:
    data = {"response_format": "verbose_json", "timestamp_granularities[]": granularities}
    body = http.post("/transcriptions", files={"file": AUDIO}, data=data).json()
    assert service.requests[0].words
    assert body["words"][:2] == [{"word": "And", "start": 0.3, "end": 0.5}, {"word": "so,", "start": 0.5, "end": 0.9}]
    assert len(body["words"]) == 4 and ("segments" in body) == ("segment" in granularities)


def test_words_are_not_computed_where_no_format_has_them(post: Post, service: FakeTranscriptions) -> None:
    post(**{"timestamp_granularities[]": "word"})
    assert not service.requests[0].words


def test_translation(post: Post, service: FakeTranscriptions) -> None:
    service.language = "de"
    body = post("/translations", response_format="verbose_json").json()
    assert (body["task"], body["language"]) == ("translate", "english")
    assert service.requests[0].task == "translate"


def test_all_parameters(post: Post, service: FakeTranscriptions) -> None:
    response = post(
        language="German",
        prompt=" Mühle ",
        temperature="0.4",
        stream="false",
        chunking_strategy="auto",
        user="me",
        **{"keywords[]": ["Wehr", "Rad"], "chunking_strategy[type]": "server_vad", "include[]": []},
    )
    assert response.status_code == 200, response.text
    asked = service.requests[0]
    assert (asked.language, asked.prompt, asked.temperature) == ("de", "Mühle Wehr, Rad", 0.4)


@pytest.mark.parametrize(
    "sent, code",
    [
        ("en", "en"),
        ("en-US", "en"),
        ("zh_TW", "zh"),
        ("haw", "haw"),
        ("Haitian Creole", "ht"),
        ("", None),
        ("auto", None),
    ],
)
def test_languages(post: Post, service: FakeTranscriptions, sent: str, code: str | None) -> None:
    assert post(language=sent).status_code == 200
    assert service.requests[0].language == code


def test_temperature_zero_is_the_default(post: Post, service: FakeTranscriptions) -> None:
    """As OpenAI has it: greedy first, higher ones where the result looks wrong."""
    post(temperature="0")
    assert service.requests[0].temperature is None


@pytest.mark.parametrize("body", [{"file": "https://mill.example/a.mp3"}, {"url": "data:audio/wav;base64,UklGRg=="}])
def test_json_with_an_address(http: httpx.Client, service: FakeTranscriptions, body: dict[str, str]) -> None:
    response = http.post(
        "/transcriptions",
        json=body | {"timestamp_granularities": ["word"], "response_format": "verbose_json", "languages": ["sv"]},
    )
    assert response.status_code == 200, response.text
    asked = service.requests[0]
    assert asked.audio == next(iter(body.values())) and asked.words and asked.language == "sv"


def test_a_form_with_an_address(http: httpx.Client, service: FakeTranscriptions) -> None:
    for fields in ({"url": "https://mill.example/a.mp3"}, {"file": "https://mill.example/a.mp3"}):
        parts = {name: (None, value) for name, value in fields.items()}
        assert http.post("/transcriptions", files=parts).status_code == 200
    assert [asked.audio for asked in service.requests] == ["https://mill.example/a.mp3"] * 2


def test_a_file_part_without_a_file_name(http: httpx.Client, service: FakeTranscriptions) -> None:
    assert http.post("/transcriptions", files={"file": (None, AUDIO)}).status_code == 200
    assert service.requests[0].audio == AUDIO


BAD = {
    "no such format": ({"response_format": "pdf"}, "response_format", "must be one of json, text, srt"),
    "speakers": ({"response_format": "diarized_json"}, "response_format", "do not tell speakers apart"),
    "language": ({"language": "the king's"}, "language", "a code of two or three letters"),
    "too hot": ({"temperature": "1.5"}, "temperature", "must be at most 1"),
    "no number": ({"temperature": "warm"}, "temperature", "must be a number"),
    "not a number": ({"temperature": "nan"}, "temperature", "must be a number"),
    "stream": ({"stream": "perhaps"}, "stream", "must be true or false"),
    "streamed subtitles": ({"stream": "true", "response_format": "srt"}, "stream", "srt cannot be streamed"),
    "logprobs": ({"include[]": "logprobs"}, "include", "include is not supported"),
    "granularity": ({"timestamp_granularities[]": "letter"}, "timestamp_granularities[0]", "'segment' or 'word'"),
    "speaker names": ({"known_speaker_names[]": "Ann"}, "known_speaker_names", "not supported"),
    "a typo": ({"respons_format": "text"}, "respons_format", "Did you mean response_format?"),
    "both": ({"url": "https://mill.example/a.mp3"}, "url", "both given"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_parameters(post: Post, service: FakeTranscriptions, name: str) -> None:
    fields, param, words = BAD[name]
    found = error(post(**fields))
    assert found["param"] == param and words in found["message"]
    assert not service.requests


def test_missing_and_empty_files(http: httpx.Client, service: FakeTranscriptions, post: Post) -> None:
    assert "file is empty" in error(post(file=b""))["message"]
    for response in (
        http.post("/transcriptions", files={"model": (None, "mill")}),
        http.post("/transcriptions", json={"model": "mill"}),
    ):
        assert "file is required: upload it" in error(response)["message"]
    assert "file must be the address" in error(http.post("/transcriptions", json={"file": 3}))["message"]
    two = [("file", ("a.wav", AUDIO)), ("file", ("b.wav", AUDIO))]
    assert "more than one file" in error(http.post("/transcriptions", files=two))["message"]
    assert "not valid JSON" in error(http.post("/transcriptions", content=b"RIFF"))["message"]
    assert not service.requests


def form(*parts: bytes, end: bytes = b"--xx--\r\n") -> bytes:
    return b"".join(b"--xx\r\n" + part + b"\r\n" for part in parts) + end


PART = b'content-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + AUDIO
TYPE = "multipart/form-data; boundary=xx"

DAMAGED = {
    "no boundary": ("multipart/form-data", form(PART), "names no boundary"),
    "another boundary": ("multipart/form-data; boundary=yy", form(PART), "not valid multipart/form-data"),
    "truncated": (TYPE, form(PART)[:-20], "incomplete"),
    "nothing": (TYPE, b"", "incomplete"),
    "no name": (TYPE, form(b"content-disposition: form-data\r\n\r\nx"), "has no name"),
    "bytes in a text": (
        TYPE,
        form(b'content-disposition: form-data; name="prompt"\r\n\r\n\xff\xfe'),
        "not valid UTF-8",
    ),
    "a long text": (
        TYPE,
        form(b'content-disposition: form-data; name="prompt"\r\n\r\n' + b"a" * 300_000),
        "prompt is larger than 262144 bytes",
    ),
    "many parts": (TYPE, form(*[b'content-disposition: form-data; name="a"\r\n\r\nb'] * 101), "more than 100 parts"),
    "long headers": (TYPE, form(b"x: " + b"y" * 9_000 + b"\r\n\r\nz"), "not valid multipart/form-data"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_forms(http: httpx.Client, service: FakeTranscriptions, name: str) -> None:
    kind, content, words = DAMAGED[name]
    assert words in error(http.post("/transcriptions", content=content, headers={"content-type": kind}))["message"]


def test_uploads_have_a_limit_of_their_own(post: Post, http: httpx.Client, service: FakeTranscriptions) -> None:
    assert post(file=AUDIO + bytes(3_900_000)).status_code == 200
    assert len(service.requests[0].audio) == len(AUDIO) + 3_900_000
    found = error(post(file=bytes(4_600_000)), 413)
    assert "--audio-bytes" in found["message"]
    assert "--body-limit" in error(http.post("/transcriptions", json={"file": "x" * 30_000}), 413)["message"]


def test_a_finished_upload_counts_no_longer(port: int, service: FakeTranscriptions, post: Post) -> None:
    """While their transcripts are made, three uploads take more than all uploads may: their files are decoded by
    then."""
    service.steps = ()
    threads = [threading.Thread(target=post, kwargs={"file": bytes(3_900_000)}) for _ in range(3)]
    held = []
    for thread in threads:
        thread.start()
        held.append(service.transcription())
        assert held[-1].waiting.wait(WAIT)
    for each in held:
        each.push(None)
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("form", ["json", "text", "verbose_json"])
def test_a_stream(post: Post, form: str) -> None:
    found = events(post(stream="true", response_format=form))
    *rest, done = found
    deltas = [each["delta"] for each in rest if each["type"] == "transcript.text.delta"]
    assert "".join(deltas) == done["text"] == TEXT
    assert done["type"] == "transcript.text.done" and done["languages"] == [{"code": "en"}]
    assert done["usage"] == {"type": "tokens", "input_tokens": 4, "output_tokens": 9, "total_tokens": 13}
    segments = [each for each in rest if each["type"] == "transcript.text.segment"]
    assert len(segments) == (4 if form == "verbose_json" else 0)
    if segments:
        assert segments[1] | {"text": ""} == {
            "type": "transcript.text.segment",
            "id": "seg_001",
            "start": 3.25,
            "end": 3661.042,
            "text": "",
            "speaker": "",
        }


def test_a_stream_of_silence(post: Post, service: FakeTranscriptions) -> None:
    service.steps, service.language = (Segment(0, 1, "  "), None), None
    (done,) = events(post(stream="true"))
    assert done["text"] == "" and "languages" not in done


def test_a_silent_stream_gets_pings(http: httpx.Client, service: FakeTranscriptions) -> None:
    service.steps = ()
    with http.stream("POST", "/transcriptions", files={"file": AUDIO}, data={"stream": "true"}) as response:
        lines = response.iter_lines()
        assert next(lines) == ": ping"
        subject = service.transcription()
        subject.push(SEGMENTS[0])
        subject.push(None)
        assert any("transcript.text.done" in line for line in lines)


def test_a_failure_in_mid_stream(client: openai.OpenAI, post: Post, service: FakeTranscriptions) -> None:
    service.steps = (SEGMENTS[0], StepFailed("the step failed"))
    first, last = events(post(stream="true"))
    assert first["type"] == "transcript.text.delta" and last["error"]["code"] == "engine_error"
    with pytest.raises(openai.APIError, match="the step failed"):
        list(client.audio.transcriptions.create(file=AUDIO, model="mill", stream=True))


ERRORS = [
    (MediaRefused("file: not audio", param="file"), 400, "invalid_media"),
    (WrongModelKind("it chats", param="model"), 400, "wrong_model_kind"),
    (EngineBusy("full", active=1, waiting=2, retry_after=3), 503, "engine_busy"),
]


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_errors_of_the_service(post: Post, service: FakeTranscriptions, number: int, stream: str) -> None:
    service.start_error, status, code = ERRORS[number]
    assert error(post(stream=stream), status)["code"] == code


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("stage", ["start", "segments"])
def test_a_client_that_leaves_cancels(port: int, service: FakeTranscriptions, stream: str, stage: str) -> None:
    service.hold_start, service.steps = stage == "start", (SEGMENTS[0],)
    part = b'content-disposition: form-data; name="stream"\r\n\r\n' + stream.encode()
    body = form(part, PART)
    head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\ncontent-type: {TYPE}\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert service.start_entered.wait(WAIT)
        if stage == "segments":
            subject = service.transcription()
            assert subject.waiting.wait(WAIT)
    if stage == "start":
        assert service.start_cancelled.wait(WAIT)
    else:
        assert subject.cancelled.wait(WAIT) and subject.left_early


def test_the_server_answers_while_a_form_trickles_in(port: int, service: FakeTranscriptions, post: Post) -> None:
    body = form(PART)
    head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\ncontent-type: {TYPE}\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:50])
        assert post().status_code == 200
        for at in range(50, len(body)):
            connection.sendall(body[at : at + 1])
        connection.settimeout(WAIT)
        assert b"200 OK" in connection.recv(4096)
    assert service.requests[-1].audio == AUDIO


def test_the_official_client(client: openai.OpenAI, service: FakeTranscriptions) -> None:
    create = client.audio.transcriptions.create
    assert create(file=AUDIO, model="mill").text == TEXT
    assert parse_srt(create(file=AUDIO, model="mill", response_format="srt")) == CUES
    assert parse_vtt(create(file=AUDIO, model="mill", response_format="vtt")) == CUES
    assert create(file=AUDIO, model="mill", response_format="text") == TEXT + "\n"
    whole = create(
        file=("a.mp3", AUDIO),
        model="mill",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        language="en",
        prompt="before",
        temperature=0.2,
        keywords=["mill"],
        chunking_strategy={"type": "server_vad", "threshold": 0.4},
    )
    assert whole.words is not None and whole.words[0].word == "And" and whole.usage is not None
    assert whole.segments is not None and whole.segments[0].avg_logprob == -0.25 and whole.duration == 3665.0
    asked = service.requests[-1]
    assert (asked.language, asked.prompt, asked.temperature, asked.words) == ("en", "before mill", 0.2, True)
    streamed = list(create(file=AUDIO, model="mill", stream=True))
    assert streamed[-1].type == "transcript.text.done" and streamed[-1].text == TEXT
    assert "".join(each.delta for each in streamed if each.type == "transcript.text.delta") == TEXT
    with pytest.warns(DeprecationWarning):  # the client says so of OpenAI's own
        assert client.audio.translations.create(file=AUDIO, model="mill").text == TEXT
    assert service.requests[-1].task == "translate"


def test_keys_are_checked_before_the_body(service: FakeTranscriptions) -> None:
    app = create_app(services(service), body_limit=1000, upload_limit=10**6, api_keys=("key",))
    with running(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT) as http:
        assert http.post("/v1/audio/transcriptions", files={"file": AUDIO}).status_code == 401
        headers = {"authorization": "Bearer key"}
        assert http.post("/v1/audio/transcriptions", files={"file": AUDIO}, headers=headers).status_code == 200
    assert len(service.requests) == 1


def test_many_segments_are_rendered(post: Post, service: FakeTranscriptions) -> None:
    service.steps = (*(Segment(at, at + 1, f" word{at}") for at in range(2_000)), None)
    assert len(parse_srt(post(response_format="srt").text)) == 2_000
    assert post().json()["text"].startswith("word0 word1 ")
