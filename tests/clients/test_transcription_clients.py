"""Clients of other projects that transcribe: litellm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from api.conftest import running
from millstream.api.app import create_app
from support.fake_transcription import TEXT, FakeTranscriptions
from support.services import services


@pytest.fixture(scope="module")
def service() -> FakeTranscriptions:
    return FakeTranscriptions()


@pytest.fixture(scope="module")
def url(service: FakeTranscriptions) -> Iterator[str]:
    with running(create_app(services(service), body_limit=10**6)) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.mark.filterwarnings("ignore")  # of litellm's own making
def test_litellm(url: str, service: FakeTranscriptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its import would ask the network for prices
    litellm = pytest.importorskip("litellm")
    file = ("speech.wav", b"RIFF and so on")
    reply = litellm.transcription("openai/mill", file=file, api_base=url, api_key="none", language="en")
    assert reply.text == TEXT
    verbose = litellm.transcription(
        "openai/mill",
        file=file,
        api_base=url,
        api_key="none",
        response_format="verbose_json",
        timestamp_granularities=["word"],
        temperature=0,
    )
    assert verbose.text == TEXT and verbose["words"][0]["word"] == "And"
    assert [(asked.model, asked.language, asked.words) for asked in service.requests] == [
        ("mill", "en", False),
        ("mill", None, True),
    ]
