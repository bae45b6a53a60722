"""Ollama's routes about models, and those of its store, which this server does not have."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import ollama
import pytest

from millstream.api.app import create_app
from millstream.model_facts import ModelCard
from support.openapi import Document
from support.services import services

QWEN = ModelCard(
    "org/qwen",
    created=1_700_000_000,
    state="ready",
    context_length=4096,
    memory_bytes=5000,
    capabilities=("completion", "tools", "thinking"),
    format="gguf",
    family="qwen2",
    parameters=7_615_616_512,
    quantization="Q4_K_M",
    template="{{ messages }}",
    file_bytes=4000,
    device="gpu (Apple M4)",
    last_used=1_800_000_000.0,
    expires=1_800_000_300.5,
)
BARE = ModelCard("bare", created=1_700_000_000, state="unloaded")


@pytest.fixture(scope="module")
def page() -> Document:
    return Document(create_app(services(None), body_limit=1000).openapi())


@pytest.fixture
def client(port, service) -> Iterator[ollama.Client]:
    service.cards = (QWEN, BARE)
    with ollama.Client(host=f"http://127.0.0.1:{port}") as client:
        yield client


def test_the_list(client, http, page):
    first, second = client.list().models
    assert (first.model, first.size, first.details.family) == ("org/qwen", 4000, "qwen2")
    assert first.modified_at is not None and first.modified_at.isoformat() == "2023-11-14T22:13:20+00:00"
    assert first.details.parameter_size == "7.62B" and first.details.quantization_level == "Q4_K_M"
    assert len(first.digest) == 64 and first.digest != second.digest
    response = http.get("/api/tags")
    page.check("/api/tags", response)
    assert response.json()["models"][1]["details"] == {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }, "typed clients refuse null"
    assert all(model["name"] == model["model"] for model in response.json()["models"])


@pytest.mark.parametrize("count, size", [(134_515_008, "134.52M"), (7_000_000_000, "7B"), (999, "999"), (0, "0")])
def test_sizes_for_people(client, service, count, size):
    service.cards = (ModelCard("m", created=1, state="unloaded", parameters=count),)
    assert client.list().models[0].details.parameter_size == size


def test_the_loaded_models(client, http, service, page):
    (model,) = client.ps().models
    assert (model.model, model.name, model.size, model.size_vram) == ("org/qwen", "org/qwen", 5000, 5000)
    assert model.context_length == 4096 and model.expires_at.timestamp() == 1_800_000_300.5
    page.check("/api/ps", http.get("/api/ps"))
    service.cards = (ModelCard("m", created=1, state="ready", memory_bytes=7, device="cpu (x86)"),)
    (model,) = client.ps().models
    assert (model.size_vram, model.expires_at.year, model.context_length) == (0, 2318, 0)


def test_a_model(client, http, page):
    model = client.show("org/qwen:latest")
    assert model.capabilities == ["completion", "tools", "thinking"]
    assert model.template == "{{ messages }}" and model.details.family == "qwen2"
    assert model.modelinfo["general.architecture"] == "qwen2"
    assert model.modelinfo["qwen2.context_length"] == 4096
    assert model.modelinfo["general.parameter_count"] == 7_615_616_512
    assert model.parameters.split() == ["num_ctx", "4096"] and "\n" not in model.parameters
    for body in ({"model": "org/qwen"}, {"name": "org/qwen"}, {"name": "org/qwen", "model": "", "verbose": True}):
        response = http.post("/api/show", json=body)
        assert response.json()["modelfile"].endswith("FROM org/qwen")
        page.check("/api/show", response)


def test_a_model_of_which_little_is_known(client, service):
    model = client.show("bare")
    assert (model.capabilities, model.parameters, model.template) == (["completion"], "", "")
    assert model.modelinfo["general.architecture"] == "unknown"
    assert service.loads == []


def test_a_model_must_be_named(http, client, page):
    for path in ("/api/show", "/api/pull", "/api/embed"):
        response = http.post(path, json={})
        assert (response.status_code, response.json()) == (400, {"error": "model is required."})
    with pytest.raises(ollama.ResponseError, match=r"model 'no' not found\. Served here: org/qwen, bare") as caught:
        client.show("no")
    assert caught.value.status_code == 404


def test_the_version_is_one_that_clients_can_compare(http, page):
    response = http.get("/api/version")
    page.check("/api/version", response)
    assert tuple(map(int, response.json()["version"].split("."))) >= (0, 12, 11)


def test_head_wherever_get_is(http):
    for path in ("/", "/api/version", "/api/tags", "/api/ps"):
        response = http.head(path)
        assert response.status_code == 200 and response.content == b""


def test_a_served_model_can_be_pulled(client, http, page):
    assert client.pull("org/qwen").status == "success"
    assert [part.status for part in client.pull("bare", stream=True)] == ["pulling manifest", "success"]
    for more in ({}, {"stream": False}):
        page.check("/api/pull", http.post("/api/pull", json={"model": "bare", **more}))


def test_other_models_cannot(client):
    for stream in (True, False):
        with pytest.raises(ollama.ResponseError, match="start it with the model's name") as caught:
            list(client.pull("llama3", stream=stream))
        assert caught.value.status_code == 404


@pytest.mark.parametrize(
    "method, path, words",
    [
        ("DELETE", "/api/delete", "does not delete models"),
        ("POST", "/api/copy", "aliases in the configuration file"),
        ("POST", "/api/push", "does not push models"),
        ("POST", "/api/create", "does not create models"),
        ("POST", "/api/blobs/sha256:00", "does not take files"),
    ],
)
def test_what_is_not_offered_says_so(client, http: httpx.Client, method, path, words):
    response = http.request(method, path, json={"model": "org/qwen", "input": "hi"})
    assert response.status_code == 400 and response.json().keys() == {"error"}
    assert words in response.json()["error"]
