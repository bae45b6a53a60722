"""/openapi.json: the document itself, and responses of a scripted service checked against it."""

from __future__ import annotations

import inspect

import httpx
import openai.types
import openai.types.chat
import pytest
import schemathesis

from millstream import errors
from millstream.api.app import create_app
from millstream.api.error_docs import error_classes
from millstream.types import CallDelta, Delta, FinishReason, PromptToken, TextLogprob
from support.openapi import Document, references
from support.services import services

KEY = "a-key"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
STOP, LENGTH, CALLS = FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS


def document(**options) -> Document:
    return Document(create_app(services(None), body_limit=1000, **options).openapi())


@pytest.fixture(scope="module")
def page() -> Document:
    return document()


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_the_document_is_valid(keys):
    subject = document(api_keys=keys)
    schemathesis.openapi.from_dict(subject.page, config=schemathesis.Config()).validate()
    for reference in references(subject.page):
        place = subject.page
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


def test_every_operation_is_described(page):
    operations = list(page.operations())
    assert {(method, path) for method, path, _ in operations} == {
        ("POST", CHAT_PATH),
        ("POST", TEXT_PATH),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("GET", "/api/hello"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/responses/input_tokens"),
        ("GET", "/v1/responses/{response_id}"),
        ("DELETE", "/v1/responses/{response_id}"),
        ("POST", "/v1/responses/{response_id}/cancel"),
        ("GET", "/v1/responses/{response_id}/input_items"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{model}"),
        ("POST", "/v1/models/{model}/load"),
        ("POST", "/v1/models/{model}/unload"),
        ("POST", "/v1/models/{model}/cache/clear"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/rerank"),
        ("POST", "/v1/score"),
        ("POST", "/api/embed"),
        ("POST", "/api/embeddings"),
        ("POST", "/api/chat"),
        ("POST", "/api/generate"),
        ("POST", "/api/show"),
        ("POST", "/api/pull"),
        ("GET", "/api/tags"),
        ("GET", "/api/ps"),
        ("GET", "/api/version"),
        ("GET", "/"),
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/server/status"),
        ("GET", "/server/history"),
        ("GET", "/server/requests"),
        ("GET", "/v1/mcp/servers"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/audio/translations"),
    }
    assert len({operation["operationId"] for _, _, operation in operations}) == len(operations)
    for method, path, operation in operations:
        assert operation["summary"] and operation["tags"]
        for status in operation["responses"]:
            response = page.response(method, path, int(status))
            assert response["description"]
            assert all(content["schema"] for content in response["content"].values())
            if int(status) >= 400 and path != "/health":
                assert response["content"].keys() == {"application/json"}


def test_streams_are_described(page):
    for path in (CHAT_PATH, TEXT_PATH):
        content = page.response("POST", path, 200)["content"]
        assert content.keys() == {"application/json", "text/event-stream"}
        assert "[DONE]" in content["text/event-stream"]["schema"]["description"]


def test_documented_parameters_are_accepted(page, http):
    schemas = page.page["components"]["schemas"]
    for name, path, base in [("ChatRequest", CHAT_PATH, CHAT), ("CompletionRequest", TEXT_PATH, TEXT)]:
        assert all(field["description"] for field in schemas[name]["properties"].values())
        optional = schemas[name]["properties"].keys() - schemas[name]["required"]
        assert http.post(path, json=base | dict.fromkeys(optional)).status_code == 200
        for other, field in schemas[name]["properties"].items():
            if "enum" in field:  # not supported, except for values without effect
                for value in field["enum"]:
                    assert http.post(path, json=base | {other: value}).status_code == 200, (other, value)
                response = http.post(path, json=base | {other: "something"})
                assert response.json()["error"]["code"] == "unsupported_parameter"
        assert "prompt_cache_key, " in schemas[name]["description"]
        assert schemas[name]["additionalProperties"] is http.post(path, json=base | {"unknown": 1}).is_success
        examples = page.page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["examples"]
        for example in examples.values():
            page.validate({"$ref": f"#/components/schemas/{name}"}, example["value"])
            assert http.post(path, json=example["value"]).status_code == 200


def test_keys_are_a_security_scheme(page):
    assert "security" not in page.page and "securitySchemes" not in page.page["components"]
    keyed = document(api_keys=(KEY,))
    schemes = keyed.page["components"]["securitySchemes"]
    assert {(scheme["type"], scheme.get("scheme"), scheme.get("name")) for scheme in schemes.values()} == {
        ("http", "bearer", None),
        ("apiKey", None, "x-api-key"),
    }
    assert keyed.page["security"] == [{name: []} for name in schemes]
    for _, path, operation in keyed.operations():
        is_open = path == "/health"
        assert operation.get("security") == ([] if is_open else None)
        assert ("401" in operation["responses"]) is not is_open
    assert all("401" not in operation["responses"] for _, _, operation in page.operations())


def test_the_document_is_built_once(serve, service):
    app = create_app(services(service), body_limit=1000)
    with serve(app) as port:
        first = httpx.get(f"http://127.0.0.1:{port}/openapi.json")
        assert first.json() == app.openapi() and app.openapi() is app.openapi()
        app.openapi_schema = {}  # a second build would return this
        assert httpx.get(f"http://127.0.0.1:{port}/openapi.json").content == first.content


class Refusing:
    """A service that raises the same error from every method."""

    error: Exception

    async def start(self, request):
        raise self.error

    async def load(self, name):
        raise self.error

    async def unload(self, name):
        raise self.error

    def clear_cache(self, name):
        raise self.error


def an_error(kind: type[errors.MillstreamError]) -> errors.MillstreamError:
    words = inspect.signature(kind).parameters.values()
    return kind(
        "as scripted", **{word.name: 3 for word in words if word.kind == word.KEYWORD_ONLY and word.name != "param"}
    )


def test_every_error_is_documented_where_it_can_be_raised(serve):
    """Covers every error of the service, on every route that calls it."""
    refusing = Refusing()
    subject = document(api_keys=(KEY,))
    routes = [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT), (CHAT_PATH, CHAT | {"stream": True})]
    routes += [(f"/v1/models/{{model}}/{action}", None) for action in ("load", "unload", "cache/clear")]
    kinds = list(error_classes())
    assert len(kinds) > 10
    with (
        serve(create_app(services(refusing), body_limit=1000)) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        for kind in kinds:
            refusing.error = an_error(kind)
            for path, body in routes:
                response = client.post(path.replace("{model}", "org/tiny"), json=body)
                assert response.status_code == kind.status and response.json()["error"]["code"] == kind.code
                subject.check(path, response)
                assert f"`{kind.code}`" in subject.response("POST", path, kind.status)["description"]


def test_errors_before_a_route(serve, service):
    subject = document(api_keys=(KEY,))
    with serve(create_app(services(service), body_limit=100, api_keys=(KEY,))) as port:
        base = f"http://127.0.0.1:{port}"
        subject.check("/v1/models", httpx.get(f"{base}/v1/models"))
        subject.check("/health", httpx.get(f"{base}/health"))
        keyed = {"x-api-key": KEY}
        too_large = httpx.post(f"{base}{TEXT_PATH}", headers=keyed, json={"prompt": "x" * 100})
        assert too_large.status_code == 413
        subject.check(TEXT_PATH, too_large)
    with serve(create_app(services(service), body_limit=100)) as port:
        response = httpx.post(f"http://127.0.0.1:{port}{TEXT_PATH}", headers={"origin": "http://other"}, json=TEXT)
        assert response.status_code == 403
        document().check(TEXT_PATH, response)


HI = (TextLogprob("hi", b"hi", -0.5, (("hi", b"hi", -0.5), ("\ufffd", b"\xf0", float("-inf")))),)
FIRST = (TextLogprob("a", b"a", None), *HI)
PROMPT = (PromptToken(), PromptToken(((1, "a", -0.5, 1), (2, "b", float("-inf"), 7))))
SCRIPTS = [
    [(Delta(0, "Hello"),), (Delta(0, " world", finish_reason=STOP),)],
    [(Delta(1, "b"), Delta(0, "a", finish_reason=LENGTH)), (Delta(1, finish_reason=STOP),)],
    [(Delta(0, "hi", HI),), (Delta(0, finish_reason=LENGTH),)],
    [(Delta(0, reasoning="hm"),), (Delta(0, "yes", finish_reason=STOP),)],
    [
        (Delta(0, calls=(CallDelta(0, "call-1", "weather", '{"ci'),)),),
        (Delta(0, calls=(CallDelta(0, arguments='ty":1}'), CallDelta(1, "call-2", "time", "{}"))),),
        (Delta(0, finish_reason=CALLS),),
    ],
    [(Delta(0, "cut off"),), errors.StepFailed("the model failed")],
    [],
]


@pytest.mark.parametrize("steps", SCRIPTS)
@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2}])
def test_responses_of_chats(page, http, service, steps, more):
    service.steps = steps or [(Delta(0, "hi", prompt=PROMPT, finish_reason=STOP),)]
    whole = http.post(CHAT_PATH, json=CHAT | more | ({} if steps else {"prompt_logprobs": 1}))
    page.check(CHAT_PATH, whole)
    if whole.status_code == 200:
        openai.types.chat.ChatCompletion.model_validate(whole.json())
    for options in ({}, {"stream_options": {"include_usage": True}}):
        stream = http.post(CHAT_PATH, json=CHAT | more | options | {"stream": True})
        assert stream.headers["content-type"].startswith("text/event-stream")
        page.check(CHAT_PATH, stream)


@pytest.mark.parametrize("steps", [*SCRIPTS[:3], *SCRIPTS[5:], [(Delta(0, "ahi", FIRST, STOP),)]])
@pytest.mark.parametrize("more", [{}, {"logprobs": 0}, {"logprobs": 2}])
def test_responses_of_completions(page, http, service, steps, more):
    service.steps = steps or [(Delta(0, "hi", prompt=PROMPT, finish_reason=STOP),)]
    whole = http.post(TEXT_PATH, json=TEXT | more | ({} if steps else {"prompt_logprobs": 1}))
    page.check(TEXT_PATH, whole)
    if whole.status_code == 200 and FIRST[0] not in service.steps[0][0].logprobs:
        openai.types.Completion.model_validate(whole.json())
    for options in ({}, {"stream_options": {"include_usage": True}}):
        stream = http.post(TEXT_PATH, json=TEXT | more | options | {"stream": True})
        assert stream.headers["content-type"].startswith("text/event-stream")
        page.check(TEXT_PATH, stream)


def test_responses_about_models_and_the_server(page, http):
    for path in ("/v1/models", "/", "/health", "/metrics"):
        page.check(path, http.get(path))
    for name in ("org/tiny", "org%2Ftiny", "plain", "none"):
        response = http.get(f"/v1/models/{name}")
        assert (response.status_code == 404) == (name == "none")
        page.check("/v1/models/{model}", response)


@pytest.mark.parametrize("action", ["load", "unload", "cache/clear"])
def test_an_action_accepts_only_post(http, action):
    response = http.get(f"/v1/models/org/tiny/{action}")
    assert response.status_code == 405 and response.headers["allow"] == "OPTIONS, POST"


def test_a_model_path_needs_a_name(http):
    assert "data" in http.get("/v1/models/").json()
    assert http.post("/v1/models//load").status_code == 405
