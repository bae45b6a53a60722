"""Answers of the routes that embed and rank match /openapi.json: for its examples, for errors, and for requests that
schemathesis makes."""

from __future__ import annotations

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

PATHS = ("/v1/embeddings", "/v1/rerank", "/v1/score", "/api/embed", "/api/embeddings")
CONFIG = {
    "seed": 19,
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
API = schemathesis.openapi.from_dict(DOCUMENT, config=schemathesis.Config.from_dict(CONFIG)).include(path=list(PATHS))


@pytest.fixture(scope="module")
def page(encoders: RunningServer) -> Document:
    return Document(httpx.get(f"{encoders.url}/openapi.json", timeout=60).json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "mill"}),
        ("/v1/embeddings", {"input": ["mill", [2, 4, 3]], "encoding_format": "base64", "user": "me"}),
        ("/v1/rerank", {"query": "mill", "documents": ["a", {"text": "b"}], "return_documents": True, "top_n": 1}),
        ("/v1/score", {"text_1": "mill", "text_2": ["a", "b"]}),
        ("/api/embed", {"model": "embed", "input": ["mill", "a"]}),
        ("/api/embed", {"model": "embed"}),
        ("/api/embeddings", {"model": "embed", "prompt": "mill"}),
    ],
)
def test_answers_match_the_document(encoders: RunningServer, page: Document, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{encoders.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    page.check(path, answer)


@pytest.mark.parametrize("path", PATHS)
def test_errors_match_the_document(encoders: RunningServer, page: Document, path: str) -> None:
    for body, status in (({"model": "none"}, (400, 404)), ({"model": "chat", "input": "a", "prompt": "a"}, (400,))):
        answer = httpx.post(f"{encoders.url}{path}", json=body, timeout=60)
        assert answer.status_code in status, answer.text
        page.check(path, answer)


def test_examples_are_answered(encoders: RunningServer, page: Document) -> None:
    for path in PATHS:
        content = page.page["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        for example in content.get("examples", {}).values():
            page.validate(content["schema"], example["value"])
            answer = httpx.post(f"{encoders.url}{path}", json=example["value"], timeout=60)
            assert answer.status_code == 200, answer.text


@API.parametrize()
def test_generated_requests_get_documented_answers(case: schemathesis.Case, encoders: RunningServer) -> None:
    """A request that matches the schema may still be refused: a schema cannot say which models exist."""
    case.call_and_validate(base_url=encoders.url, excluded_checks=[positive_data_acceptance])
