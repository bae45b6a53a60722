"""Fuzzes a real server with schemathesis: valid and invalid requests generated from /openapi.json.

The number of requests is bounded, and every run sends the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance

from millstream.api.app import create_app
from millstream.config import ModelSpec, Settings
from millstream.models.source import ModelSource
from support.scripted import ScriptedBackend
from support.server import RunningServer, running
from support.services import services
from support.tiers import is_whole

KEY = "a-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
CONFIG = {
    "seed": 14,
    "cache": {"enabled": False},
    "auth": {"openapi": {"bearer": {"bearer": KEY}}},
    "generation": {
        "deterministic": True,
        "max-examples": 30 if is_whole() else 6,  # of each operation
        "no-shrink": True,
        "database": "none",
        "with-security-parameters": False,
    },
    # Walks every bound of every field, which takes longer than all other tests of this file.
    "phases": {"coverage": {"enabled": is_whole()}},
    "request-timeout": 30,
}
service: Any = None
DOCUMENT = create_app(services(service), body_limit=2**20, api_keys=(KEY,)).openapi()
API = schemathesis.openapi.from_dict(DOCUMENT, config=schemathesis.Config.from_dict(CONFIG))

HI_AND_END = (72, 105, 258)


def short_answers(source: ModelSource, settings: Settings) -> ScriptedBackend:
    """Answers briefly: the content does not matter here, but streams have to end."""
    return ScriptedBackend(lambda submit: HI_AND_END, vocab=259, context_length=512)


@pytest.fixture(scope="module")
def server(servable: Path) -> Iterator[RunningServer]:
    model = ModelSpec(str(servable), name="millstream-demo", max_tokens=16)
    with running(Settings((model,), port=0, max_batch=8, api_keys=(KEY,)), short_answers) as subject:
        yield subject


def test_the_server_serves_this_document(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/openapi.json", headers=HEADERS).json() == DOCUMENT


@API.parametrize()
def test_responses_match_the_document_for_generated_requests(case: schemathesis.Case, server: RunningServer) -> None:
    """Runs all checks but one: a request that matches the schema may still be refused. A schema cannot express which
    models exist, their context length, valid grammars, or which parameters exclude each other."""
    case.call_and_validate(base_url=server.url, excluded_checks=[positive_data_acceptance])
