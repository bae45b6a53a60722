"""Transcripts, their events and errors match /openapi.json, also for requests that schemathesis makes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance

from api.conftest import running
from millstream.api.app import create_app
from millstream.api.openai.audio.transcription_schema import EXAMPLES
from support.fake_transcription import FakeTranscriptions
from support.openapi import Document
from support.services import services
from support.tiers import is_whole

PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
CONFIG = {
    "seed": 20,
    "cache": {"enabled": False},
    "generation": {
        "deterministic": True,
        "max-examples": 60 if is_whole() else 6,
        "no-shrink": True,
        "database": "none",
        "with-security-parameters": False,
    },
    "phases": {"coverage": {"enabled": is_whole()}},
    "request-timeout": 60,
}
APP = create_app(services(FakeTranscriptions()), body_limit=2**20)
DOCUMENT = APP.openapi()
API = schemathesis.openapi.from_dict(DOCUMENT, config=schemathesis.Config.from_dict(CONFIG)).include(path=list(PATHS))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(APP, timeout_keep_alive=60) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("path", PATHS)
def test_answers_match_the_document(url: str, path: str) -> None:
    page = Document(DOCUMENT)
    words: dict[str, Any] = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    for fields in ({}, words):
        answer = httpx.post(url + path, files={"file": b"RIFF"}, data=fields, timeout=60)
        assert answer.status_code == 200
        page.check(path, answer)
    told = page.response("POST", path, 200)["content"]["text/event-stream"]["schema"]["properties"]["data"]
    for form in ("json", "verbose_json"):
        fields = {"stream": "true", "response_format": form}
        answer = httpx.post(url + path, files={"file": b"RIFF"}, data=fields, timeout=60)
        lines = [line for line in answer.text.split("\n\n") if line]
        assert len(lines) > 3
        for line in lines:
            page.validate(told["contentSchema"], json.loads(line.removeprefix("data: ")))
    for form in ("text", "srt", "vtt"):
        answer = httpx.post(url + path, files={"file": b"RIFF"}, data={"response_format": form}, timeout=60)
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    refused = httpx.post(url + path, files={"file": b""}, timeout=60)
    assert refused.status_code == 400
    page.check(path, refused)
    for example in EXAMPLES.values():
        assert httpx.post(url + path, json=example["value"], timeout=60).status_code == 200


@API.parametrize()
def test_requests_that_schemathesis_makes(case: schemathesis.Case, url: str) -> None:
    """A form or an address is needed, which the schema of JSON does not say."""
    case.call_and_validate(base_url=url, excluded_checks=[positive_data_acceptance])
