"""Models in Anthropic's shape, signs of life, and the part of /openapi.json that describes Anthropic's routes."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime

import anthropic
import httpx
import pytest

from millstream import errors
from millstream.api.app import create_app
from millstream.api.error_docs import error_classes
from millstream.model_facts import ModelCard
from millstream.types import CallDelta, Delta, FinishReason
from support.anthropic_types import raw_events
from support.openapi import Document
from support.services import services

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
VERSION = {"anthropic-version": "2023-06-01"}
HI = [{"role": "user", "content": "hi"}]
BODY = {"max_tokens": 16, "messages": HI}


@pytest.fixture
def client(http):
    with anthropic.Anthropic(base_url=str(http.base_url), api_key="-", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def page() -> Document:
    return Document(create_app(services(None), body_limit=1000).openapi())


def test_the_list_of_models(http):
    body = http.get("/v1/models?limit=1000", headers=VERSION).json()
    assert body == {
        "data": [
            {
                "type": "model",
                "id": "org/tiny",
                "display_name": "org/tiny",
                "created_at": "1970-01-01T00:00:11Z",
                "lifecycle": "active",
                "max_input_tokens": 2048,
                "max_tokens": 2048,
            },
            {
                "type": "model",
                "id": "plain",
                "display_name": "plain",
                "created_at": "1970-01-01T00:00:12Z",
                "lifecycle": "active",
                "max_input_tokens": None,
                "max_tokens": None,
            },
        ],
        "has_more": False,
        "first_id": "org/tiny",
        "last_id": "plain",
    }
    assert http.get("/v1/models").json()["object"] == "list", "without the header it is OpenAI's"
    assert http.head("/v1/models", headers=VERSION).status_code == 200


def test_pages_of_models(client, http, service):
    service.cards = [ModelCard(f"org/m{number}", created=number, state="ready") for number in range(7)]
    names = [card.name for card in service.cards]
    assert [model.id for model in client.models.list(limit=3)] == names
    first = client.models.list(limit=3)
    assert [model.id for model in first.data] == names[:3] and first.has_more
    assert first.data[0].created_at == datetime.fromtimestamp(0, UTC)
    back = client.models.list(limit=2, before_id="org/m5")
    assert [model.id for model in back.data] == names[3:5] and back.has_more
    last = client.models.list(limit=3, after_id="org/m5")
    assert [model.id for model in last.data] == names[6:] and not last.has_more
    service.cards = []
    empty = client.models.list()
    assert empty.data == [] and empty.first_id is None
    for query in ("limit=0", "limit=1001", "limit=x", "after_id=none", "before_id=none"):
        response = http.get(f"/v1/models?{query}", headers=VERSION)
        assert response.status_code == 400 and query.split("=")[0] in response.json()["error"]["message"]


def test_one_model(client, http):
    assert client.models.retrieve("plain").id == "plain"
    for name in ("org/tiny", "org%2Ftiny"):
        assert http.get(f"/v1/models/{name}", headers=VERSION).json()["id"] == "org/tiny"
    with pytest.raises(anthropic.NotFoundError, match="none"):
        client.models.retrieve("none")
    assert http.get("/v1/models/org/tiny").json()["object"] == "model"


def test_actions_on_models_are_not_affected_by_the_header(http):
    assert "POST" in http.options("/v1/models/org/tiny/load", headers=VERSION).headers["allow"]


def test_signs_of_life(http):
    for path in ("/", "/api/hello"):
        response = http.head(path)
        assert response.status_code == 200 and response.content == b""
    assert http.get("/api/hello").json() == {"message": "hello"}


def test_the_examples_are_valid(page, http):
    for path, name in ((PATH, "MessagesRequest"), (COUNT, "CountRequest")):
        schema = page.page["components"]["schemas"][name]
        assert schema["additionalProperties"] is True
        assert all(field["description"] for field in schema["properties"].values())
        examples = page.page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["examples"]
        for example in examples.values():
            page.validate({"$ref": f"#/components/schemas/{name}"}, example["value"])
            assert http.post(path, json=example["value"]).status_code == 200
        base = {key: BODY[key] for key in schema["required"]}
        optional = schema["properties"].keys() - schema["required"]
        assert http.post(path, json=base | dict.fromkeys(optional)).status_code == 200
        assert http.post(path, json=base | {"mesages": 1}).status_code == 400


SCRIPTS = [
    [(Delta(0, "Hello", reasoning="hm"),), (Delta(0, " world", finish_reason=FinishReason.STOP, stop_string="x"),)],
    [(Delta(0, calls=(CallDelta(0, "c", "f", '{"a":1}'),), finish_reason=FinishReason.TOOL_CALLS),)],
    [(Delta(0, "cut off"),), errors.StepFailed("the model failed")],
]


@pytest.mark.parametrize("steps", SCRIPTS)
def test_answers_match_the_document(page, http, service, steps):
    service.steps = steps
    page.check(PATH, http.post(PATH, json=BODY))
    stream = http.post(PATH, json=BODY | {"stream": True})
    schema = page.response("POST", PATH, 200)["content"]["text/event-stream"]["schema"]
    for event in raw_events(stream.text):
        page.validate(schema["properties"]["data"]["contentSchema"], event)
    page.check(COUNT, http.post(COUNT, json={"messages": HI}))
    page.check("/api/hello", http.get("/api/hello"))


def an_error(kind: type[errors.MillstreamError]) -> errors.MillstreamError:
    words = inspect.signature(kind).parameters.values()
    return kind(
        "as scripted", **{word.name: 3 for word in words if word.kind == word.KEYWORD_ONLY and word.name != "param"}
    )


def test_every_error_is_documented_where_it_can_be_raised(serve, service):
    subject = Document(create_app(services(None), body_limit=1000, api_keys=("k",)).openapi())
    with (
        serve(create_app(services(service), body_limit=1000)) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        for kind in error_classes():
            service.start_error = an_error(kind)
            for path, body in ((PATH, BODY), (PATH, BODY | {"stream": True}), (COUNT, {"messages": HI})):
                response = client.post(path, json=body)
                assert response.status_code >= 400
                subject.check(path, response)
