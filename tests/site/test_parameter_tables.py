"""docs/parameters.md, held against the schemas of requests.

    MILLSTREAM_UPDATE_DOCS=1 make test ARGS=tests/site/test_parameter_tables.py

writes it again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from millstream.api.app import create_app
from millstream.api.openai.params import IGNORED, UNSUPPORTED
from support.parameter_tables import REQUESTS, page
from support.services import services

PAGE = Path(__file__).parents[2] / "docs" / "parameters.md"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = create_app(services(None), body_limit=1000).openapi()
    return found


def test_the_page_is_made_from_the_schemas(document: dict[str, Any]) -> None:
    if os.environ.get("MILLSTREAM_UPDATE_DOCS"):
        PAGE.write_text(page(document), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(document), "write it again: see the first lines of this file"


def test_every_request_that_generates_has_a_table(document: dict[str, Any]) -> None:
    generating = {"text", "responses", "messages", "ollama", "embeddings", "rerank", "transcription", "speech"}
    posts = {
        path
        for path, operations in document["paths"].items()
        if "post" in operations and generating & set(operations["post"]["tags"]) and "{" not in path
    }
    alike = "/v1/audio/translations"
    others = {
        alike,
        "/v1/responses/input_tokens",
        "/v1/messages/count_tokens",
        "/api/show",
        "/api/pull",
        "/api/embeddings",
    }
    assert posts - others == {path for _, path, _ in REQUESTS}


def test_openai_md_says_what_is_served_ignored_and_refused(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    fields = {name for request in ("ChatRequest", "CompletionRequest") for name in schemas[request]["properties"]}
    text = (PAGE.parent / "openai.md").read_text(encoding="utf-8")
    served, rest = text.split("| ignored | |")
    ignored, refused = rest.split("Refused, unless neutral:")
    named = names_in("".join(re.findall(r"^\| (`.*?) \|", served, re.M)))
    assert [name for name in named if "*" not in name and name.partition(".")[0] not in fields] == []
    named = names_in(refused.split("\n\n")[0])
    assert [name for name in named if name not in UNSUPPORTED] == []
    named = names_in("".join(re.findall(r"^\| .*? \| (`.*?) \|", ignored, re.M)))
    assert [name for name in named if "." not in name and name not in IGNORED] == []


def names_in(text: str) -> list[str]:
    """The names in a part of a page, of which there are some."""
    return sorted(re.findall(r"`([\w.*]+)`", text)) or pytest.fail("no names")
