"""Clients that speak, with a real engine on a tiny random Kokoro: openai, litellm, curl, and a socket that leaves."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from millstream.media.wav import open_wav
from support.heard import heard
from support.server import RunningServer
from support.tiny_kokoro import VOICES

WAIT = 60
TEXT = "The mill stands by the stream. Water drives the wheel."


@pytest.fixture(scope="module")
def client(speaking: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{speaking.url}/v1", api_key="none", max_retries=0, timeout=WAIT) as client:
        yield client


@pytest.fixture(scope="module")
def expected(client: openai.OpenAI) -> Any:
    """What the model says, sample by sample."""
    spoken = client.audio.speech.create(model="voice", input=TEXT, voice="af_heart", response_format="wav").read()
    return open_wav(spoken).mono()


@pytest.mark.parametrize("form", ["mp3", "opus", "aac", "flac", "pcm"])
def test_openai_streams_every_format(client: openai.OpenAI, expected: Any, form: Any) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="voice", input=TEXT, voice="af_heart", response_format=form
    ) as response:
        made, rate = heard(b"".join(response.iter_bytes()), form)
    assert len(made) / rate == pytest.approx(len(expected) / 24_000, abs=0.11)
    assert np.abs(made).max() > 0.001  # random weights make noise, of which codecs keep little
    if form in ("flac", "pcm"):
        np.testing.assert_allclose(made, expected, atol=1e-4)


def test_the_async_client(speaking: RunningServer, expected: Any) -> None:
    async def speak() -> bytes:
        async with openai.AsyncOpenAI(base_url=f"{speaking.url}/v1", api_key="none", max_retries=0) as client:
            answers = [
                client.audio.speech.create(model="voice", input=TEXT, voice="af_heart", response_format="wav")
                for _ in range(3)
            ]
            first, *others = [answer.content for answer in await asyncio.gather(*answers)]
            assert others == [first, first], "requests at once disturb each other"
            return first

    assert open_wav(asyncio.run(speak())).mono().tolist() == expected.tolist()


def test_voices_and_speed_change_the_sound(client: openai.OpenAI, expected: Any) -> None:
    def spoken(**more: Any) -> Any:
        body = {"model": "voice", "input": TEXT, "voice": "af_heart", "response_format": "wav"} | more
        return open_wav(client.audio.speech.create(**body).read()).mono()

    assert len(spoken(speed=2.0)) < 0.8 * len(expected)
    other = spoken(voice="am_adam")
    assert len(other) != len(expected) or not np.allclose(other, expected)
    assert len(spoken(voice="alloy")), "a name of OpenAI's voices"
    assert len(spoken(voice={"id": "af_heart+am_adam(2)"}))
    with pytest.raises(openai.BadRequestError, match=r"there is no voice 'af_hart'\. Did you mean") as error:
        spoken(voice="af_hart")
    assert error.value.param == "voice"
    with pytest.raises(openai.NotFoundError, match="Served: voice"):
        spoken(model="tts-1")


def test_events(speaking: RunningServer, expected: Any) -> None:
    body = {"input": TEXT, "voice": "af_heart", "response_format": "wav", "stream_format": "sse"}
    lines = httpx.post(f"{speaking.url}/v1/audio/speech", json=body, timeout=WAIT).text.split("\n\n")
    *deltas, done = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    spoken = open_wav(b"".join(base64.b64decode(each["audio"]) for each in deltas)).mono()
    assert spoken.tolist() == expected.tolist()
    assert len(deltas) >= 2, "a delta for each sentence"
    assert done["usage"]["input_tokens"] == done["usage"]["total_tokens"] > 30


def test_voices_are_listed(speaking: RunningServer) -> None:
    listed = httpx.get(f"{speaking.url}/v1/audio/voices", timeout=WAIT).json()["voices"]
    assert {voice["id"] for voice in listed} == set(VOICES) and listed[0]["id"] == "af_heart"
    assert httpx.get(f"{speaking.url}/v1/audio/models").json() == {"models": [{"id": "voice", "name": "voice"}]}


@pytest.mark.filterwarnings("ignore")  # of litellm's own making
def test_litellm(speaking: RunningServer, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its import would ask the network for prices
    litellm = pytest.importorskip("litellm")
    speech = litellm.speech(
        "openai/voice",
        input=TEXT,
        voice="af_heart",
        response_format="flac",
        api_base=f"{speaking.url}/v1",
        api_key="none",
    )
    speech.stream_to_file(tmp_path / "speech.flac")
    made, _ = heard((tmp_path / "speech.flac").read_bytes(), "flac")
    np.testing.assert_allclose(made, expected, atol=1e-4)


def test_curl(speaking: RunningServer, expected: Any, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    body = json.dumps({"input": TEXT, "voice": "af_heart", "response_format": "wav", "stream": False})
    command = ["curl", "-sSf", f"{speaking.url}/v1/audio/speech", "-d", body, "-o", str(tmp_path / "speech.wav")]
    subprocess.run(command, check=True, timeout=WAIT)
    assert open_wav((tmp_path / "speech.wav").read_bytes()).mono().tolist() == expected.tolist()


def test_a_client_that_leaves_ends_the_work(speaking: RunningServer) -> None:
    body = json.dumps({"input": TEXT * 500, "response_format": "pcm"}).encode()
    with socket.create_connection(("127.0.0.1", speaking.port), timeout=WAIT) as line:
        head = f"POST /v1/audio/speech HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        line.sendall(head.encode() + body)
        assert line.recv(1000).startswith(b"HTTP/1.1 200")
    deadline = time.monotonic() + WAIT
    while (card := httpx.get(f"{speaking.url}/v1/models").json()["data"][0])["active"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (card["active"], card["waiting"]) == (0, 0)
    ended = httpx.get(f"{speaking.url}/server/requests").json()["recent"][0]
    assert (ended["endpoint"], ended["state"], ended["model"]) == ("/v1/audio/speech", "cancelled", "voice")
