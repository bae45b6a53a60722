"""Answers of the routes that speak match /openapi.json: for its examples, for errors, and for requests that
schemathesis makes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance

from millstream.api.app import create_app
from support.openapi import Document
from support.server import RunningServer
from support.services import services
from support.tiers import is_whole

SPEECH = "/v1/audio/speech"
GETS = ("/v1/audio/voices", "/v1/audio/models")
CONFIG = {
    "seed": 20,
    "cache": {"enabled": False},
    "generation": {
        "deterministic": True,
        "max-examples": 30 if is_whole() else 6,
        "no-shrink": True,
        "database": "none",
        "with-security-parameters": False,
    },
    "phases": {"coverage": {"enabled": is_whole()}},
    "request-timeout": 30,
}
service: Any = None
DOCUMENT = create_app(services(service), body_limit=2**20).openapi()
API = schemathesis.openapi.from_dict(DOCUMENT, config=schemathesis.Config.from_dict(CONFIG))
API = API.include(path=[SPEECH, *GETS])


@pytest.fixture(scope="module")
def page(speaking: RunningServer) -> Document:
    return Document(httpx.get(f"{speaking.url}/openapi.json", timeout=60).json())


def test_examples_are_answered(speaking: RunningServer, page: Document) -> None:
    content = page.page["paths"][SPEECH]["post"]["requestBody"]["content"]["application/json"]
    for example in content["examples"].values():
        page.validate(content["schema"], example["value"])
        answer = httpx.post(f"{speaking.url}{SPEECH}", json=example["value"], timeout=60)
        assert answer.status_code == 200, answer.text
        told = page.response("POST", SPEECH, 200)["content"][answer.headers["content-type"].partition(";")[0]]
        if "data" not in told["schema"].get("properties", {}):
            continue
        schema = told["schema"]["properties"]["data"]["contentSchema"]
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert len(events) > 1
        for event in events:
            page.validate(schema, json.loads(event))


@pytest.mark.parametrize("path", GETS)
def test_lists_match_the_document(speaking: RunningServer, page: Document, path: str) -> None:
    page.check(path, httpx.get(f"{speaking.url}{path}", timeout=60))


def test_errors_match_the_document(speaking: RunningServer, page: Document) -> None:
    for body in ({}, {"input": "a", "model": "none"}, {"input": "a", "voice": "nobody"}, {"input": "..."}):
        answer = httpx.post(f"{speaking.url}{SPEECH}", json=body, timeout=60)
        assert answer.status_code in (400, 404), answer.text
        page.check(SPEECH, answer)
    page.check(GETS[0], httpx.get(f"{speaking.url}{GETS[0]}", params={"model": "none"}, timeout=60))


@API.parametrize()
def test_generated_requests_get_documented_answers(case: schemathesis.Case, speaking: RunningServer) -> None:
    """A request that matches the schema may still be refused: a schema cannot say which voices exist."""
    case.call_and_validate(base_url=speaking.url, excluded_checks=[positive_data_acceptance])
