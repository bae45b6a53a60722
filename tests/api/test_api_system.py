"""Models, health, metrics, docs, and the app's lifespan."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from millstream import __version__
from millstream.api.app import create_app
from support.services import services


def test_models(client):
    cards = list(client.models.list())
    assert [(card.id, card.object, card.created, card.owned_by) for card in cards] == [
        ("org/tiny", "model", 11, "millstream"),
        ("plain", "model", 12, "millstream"),
    ]


def test_one_model(http, client):
    card = http.get("/v1/models/org/tiny").json()
    assert (card["id"], card["state"], card["context_length"]) == ("org/tiny", "ready", 2048)
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_health(http):
    response = http.get("/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "models": {"org/tiny": "ready", "plain": "loading"}}


def test_problems_degrade_the_health(service, serve_module):
    problems = ["the cache folder is full"]
    with serve_module(create_app(services(service, problems=lambda: problems), body_limit=1000)) as port:
        found = httpx.get(f"http://127.0.0.1:{port}/health")
        assert (found.status_code, found.json()["status"], found.json()["problems"]) == (200, "degraded", problems)
        problems.clear()
        found = httpx.get(f"http://127.0.0.1:{port}/health").json()
        assert found["status"] == "ok" and "problems" not in found


def test_metrics(http):
    response = http.get("/metrics")
    assert response.text == "millstream_up 1\n"
    assert response.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"


def test_root(http):
    assert http.get("/").json() == {"name": "Millstream", "version": __version__, "docs": "/docs"}


def test_docs_show_routes_and_described_parameters(http):
    assert "/page/docs/main.js" in http.get("/docs").text
    page = http.get("/openapi.json").json()
    assert (page["info"]["title"], page["info"]["version"]) == ("Millstream", __version__)
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= page["paths"].keys()
    schemas = page["components"]["schemas"]
    body = page["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    for name in ("ChatRequest", "CompletionRequest"):
        for parameter, schema in schemas[name]["properties"].items():
            assert schema.get("description"), parameter


def test_lifespan_runs_around_the_app(service):
    seen = []

    @asynccontextmanager
    async def lifespan(app):
        seen.append("up")
        yield
        seen.append("down")

    async def main():
        app = create_app(services(service), body_limit=1000, lifespan=lifespan)
        mail = asyncio.Queue()
        for kind in ("lifespan.startup", "lifespan.shutdown"):
            mail.put_nowait({"type": kind})
        await app({"type": "lifespan", "app": app, "state": {}}, mail.get, responses.append_async)

    class Responses(list):
        async def append_async(self, message):
            self.append(message["type"])

    responses = Responses()
    asyncio.run(main())
    assert seen == ["up", "down"]
    assert responses == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
