"""Models on mlx-audio's modules over HTTP: found by their folders, with what each can do, and with words and sound."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import mlx.core as mx
import numpy as np
import openai
import pytest

from millstream.backend.speech.library_pieces import seed_of
from millstream.config import Settings
from millstream.engine.speech.messages import Piece
from millstream.engine.speech.plan import PieceInput
from support import tiny_mlx_audio as tiny
from support.audio_files import wav
from support.server import RunningServer, running
from support.spoken import spoken

TEXT = "The cat sat!"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[RunningServer]:
    models = (
        tiny.write_parakeet(root / "parakeet", "tdt", seed=3),
        tiny.write_qwen3_asr(root / "qwen3-asr"),
        tiny.write_voxtral(root / "voxtral"),
        tiny.write_pocket_tts(root / "pocket"),
        tiny.write_qwen3_tts(root / "qwen3-tts", sort="voice_design"),
    )
    with running(Settings(tuple(map(str, models)), port=0, isolation="thread")) as subject:
        yield subject


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


@pytest.fixture(scope="module")
def sound() -> bytes:
    return wav(spoken(2.0))


def test_transcripts_with_the_times_of_words(client: openai.OpenAI, sound: bytes) -> None:
    told = client.audio.transcriptions.create(
        model="parakeet", file=("a.wav", sound), response_format="verbose_json", timestamp_granularities=["word"]
    )
    assert told.text.strip() and told.words
    assert all(0 <= word.start <= word.end <= 2.1 for word in told.words)


@pytest.mark.parametrize("model", ["qwen3-asr", "voxtral"])
def test_transcripts_in_a_language(model: str, client: openai.OpenAI, sound: bytes) -> None:
    told = client.audio.transcriptions.create(model=model, file=("a.wav", sound), language="en", temperature=0)
    again = client.audio.transcriptions.create(model=model, file=("a.wav", sound), language="en", temperature=0)
    assert told.text.strip() and told.text == again.text


def test_models_say_what_they_can_do(server: RunningServer) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]}
    able = {name: card["capabilities"] for name, card in cards.items()}
    assert able["parakeet"] == ["transcription", "word_timestamps"]
    assert able["qwen3-asr"] == able["voxtral"] == ["transcription"]
    assert able["pocket"] == ["speech"]


def test_speech_is_the_librarys(server: RunningServer, client: openai.OpenAI, root: Path) -> None:
    spoken = client.audio.speech.create(model="pocket", input=TEXT, voice="marius", response_format="pcm").content
    model = tiny.library_pocket_tts(root / "pocket")
    mx.random.seed(seed_of(PieceInput(0, 0, Piece(text=TEXT), (("marius", 1.0),))))
    (expected,) = model.generate(TEXT, voice="marius")
    found = np.frombuffer(spoken, "<i2") / 32_768
    assert found.shape == (expected.samples,)
    np.testing.assert_allclose(found, np.clip(np.asarray(expected.audio), -1, 1), atol=0.02)
    voices = json.dumps(httpx.get(f"{server.url}/v1/audio/voices?model=pocket", timeout=60).json())
    assert all(name in voices for name in tiny.POCKET_VOICES)


def test_a_voice_from_a_description(server: RunningServer, client: openai.OpenAI) -> None:
    spoken = client.audio.speech.create(
        model="qwen3-tts", input="the cat", voice="alloy", instructions="happy", response_format="wav"
    )
    assert spoken.content[:4] == b"RIFF" and len(spoken.content) > 1000
    card = httpx.get(f"{server.url}/v1/models/qwen3-tts", timeout=60).json()
    assert card["capabilities"] == ["speech", "instructions"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model": "pocket", "speed": 2}, "speed must be 1"),
        ({"model": "pocket", "voice": "nobody"}, "no voice 'nobody'. Its voices: alba, marius"),
        ({"model": "qwen3-tts"}, "say in `instructions` what it is like"),
        ({"model": "pocket", "input": "..."}, "nothing in the text can be spoken"),
    ],
)
def test_what_a_model_cannot_do_is_said(body: dict[str, object], message: str, server: RunningServer) -> None:
    asked = {"input": TEXT, "response_format": "pcm", **body}
    answer = httpx.post(f"{server.url}/v1/audio/speech", json=asked, timeout=60)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
