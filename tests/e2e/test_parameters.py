"""Parameters of requests, from the JSON of every dialect to what the engine gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from millstream.config import ModelSpec
from millstream.engine.generation.messages import Generate
from millstream.parameters import IGNORED, PARAMETERS, REFUSED, REFUSED_THINKING
from millstream.types import Sampling
from support.scripted_server import ScriptedServer, scripted_server
from support.tiny import write_servable

HI = [{"role": "user", "content": "Hi"}]
TEXT = {"prompt": "Hi", "max_tokens": 4, "temperature": 1}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
ADVICE = {"do_sample": True, "temperature": 0.3, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("parameters")
    write_servable(folder / "advised")
    (folder / "advised" / "generation_config.json").write_text(json.dumps(ADVICE))
    advised = ModelSpec(str(folder / "advised"), name="advised", sampling=(("top_k", 40),), max_tokens=50)
    with scripted_server(folder / "tiny", advised) as running:
        yield running


@pytest.fixture
def http(server: ScriptedServer) -> Iterator[httpx.Client]:
    server.submits.clear()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def drawn_seeds(server: ScriptedServer, http: httpx.Client, **more: object) -> list[int]:
    """What the sampler makes of the seeds of all choices."""
    server.submits.clear()
    assert http.post("/v1/completions", json=TEXT | more).status_code == 200
    found = [submit.sampling.seed for submit in server.submits]
    return sorted((seed ^ (seed >> 32)) & 0xFFFFFFFF for seed in found)


@pytest.mark.parametrize("seed", [-128, -2, -1, 0, 7, 2**32 - 2, 2**63 - 1, -(2**63)])
def test_choices_have_seeds_of_their_own(server: ScriptedServer, http: httpx.Client, seed: int) -> None:
    found = drawn_seeds(server, http, seed=seed, n=16)
    assert len(set(found)) == 16
    assert (drawn_seeds(server, http, seed=seed, n=16) == found) is (seed != -1), "-1 is a random seed"


DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 40},
    "/api/chat": {"messages": HI, "stream": False, "options": {}},
    "/api/generate": {"prompt": "Hi", "stream": False, "options": {}},
}


def ask(http: httpx.Client, path: str, *, model: str = "", **parameters: object) -> httpx.Response:
    body = DIALECTS[path] | ({"model": model} if model else {})
    if "options" in body:
        return http.post(path, json=body | {"options": parameters})
    if body.keys() & parameters.keys() or "max_tokens" not in body:
        return http.post(path, json=body | parameters)
    named = {"max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict"}
    value = next((parameters[name] for name in named & parameters.keys()), body["max_tokens"])
    return http.post(path, json=body | {"max_tokens": value} | parameters)


def sampled(name: str, value: object) -> Callable[[Generate], bool]:
    return lambda submit: getattr(submit.sampling, name) == value


WALKED: dict[str, tuple[object, Callable[[Generate], bool]]] = {
    "temperature": (0.3, sampled("temperature", 0.3)),
    "top_p": (0, sampled("top_p", 0)),
    "top_k": (7, sampled("top_k", 7)),
    "min_p": (0.2, sampled("min_p", 0.2)),
    "seed": (11, sampled("seed", 11)),
    "repetition_penalty": (1.5, sampled("repetition_penalty", 1.5)),
    "presence_penalty": (0.5, sampled("presence_penalty", 0.5)),
    "frequency_penalty": (-0.5, sampled("frequency_penalty", -0.5)),
    "repeat_last_n": (0, sampled("repetition_penalty", 1.0)),
    "logit_bias": ({"5": 3}, sampled("logit_bias", ((5, 3.0),))),
    "max_tokens": (3, lambda submit: submit.max_tokens == 3),
    "min_tokens": (2, lambda submit: submit.min_tokens == 2),
    "stop": (["World"], lambda submit: True),
    "stop_token_ids": ([9], lambda submit: 9 in submit.stop_tokens),
    "ignore_eos": (True, lambda submit: not submit.stop_tokens),
    "prediction": ({"type": "content", "content": "Hello"}, lambda submit: len(submit.prediction) > 0),
    "speculate": (False, lambda submit: not submit.speculate),
    "spec_prefill": (False, lambda submit: not submit.spec_prefill),
}
"""A value for each parameter that is not the default, and whether an engine's request has it."""


def test_all_parameters_are_walked() -> None:
    assert WALKED.keys() == {row.name for row in PARAMETERS}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("name, field", [(name, row.name) for row in PARAMETERS for name in row.all_names])
def test_a_parameter_reaches_the_engine(
    server: ScriptedServer, http: httpx.Client, path: str, name: str, field: str
) -> None:
    value, arrives = WALKED[field]
    beside = {"repeat_last_n": {"repetition_penalty": 2}}.get(field, {})
    server.answer = "Hello, World and all."
    response = ask(http, path, **{name: value}, **beside)
    assert response.status_code == 200, response.text
    (submit,) = server.submits
    assert arrives(submit), submit.sampling
    assert ("Hello, " in response.text and "and all" not in response.text) or field != "stop"
    part = {name: 5 if field == "stop" else "wrong"}
    whole = DIALECTS[path]
    wrong = http.post(path, json=whole | ({"options": part} if "options" in whole else part))
    assert wrong.status_code == 400 and name in wrong.text


@pytest.mark.parametrize("path", DIALECTS)
def test_what_would_change_the_output_is_refused_by_name(server: ScriptedServer, http: httpx.Client, path: str) -> None:
    schema = http.get("/openapi.json").json()
    fields = fields_of(schema, path)
    refused = REFUSED | ({} if path == "/v1/completions" else REFUSED_THINKING)
    told = {name for name in refused if fields[name].get("description", "").startswith("Not supported.")}
    assert len(told) > 40 or path.startswith("/v1/c")
    for name in told:
        response = ask(http, path, **{name: [3.5]})
        assert response.status_code == 400 and f"{name} is not supported" in response.text
    for number in range(2):
        neutral = {name: refused[name][number] if number < len(refused[name]) else None for name in told}
        response = ask(http, path, **neutral)
        assert response.status_code == 200, response.text
    assert ask(http, path, **dict.fromkeys(IGNORED, 5)).status_code == 200


def fields_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The schemas of the fields that may have parameters."""

    def of(schema: dict[str, Any]) -> dict[str, Any]:
        name = schema["$ref"].rsplit("/", 1)[1]
        found: dict[str, Any] = document["components"]["schemas"][name]["properties"]
        return found

    fields = of(document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])
    return of(fields["options"]["anyOf"][0]) if "options" in DIALECTS[path] else fields


@pytest.mark.parametrize("path", DIALECTS)
def test_an_output_that_must_end_cannot_go_on(server: ScriptedServer, http: httpx.Client, path: str) -> None:
    response = ask(http, path, max_tokens=3, min_tokens=4)
    assert response.status_code == 400 and "min_tokens (4) is more than the token limit (3)" in response.text
    assert server.submits == []


@pytest.mark.parametrize("name, value", [("ignore_eos", True), ("min_tokens", 4)])
def test_forms_end_where_their_grammar_says(
    server: ScriptedServer, http: httpx.Client, name: str, value: object
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    chat = {"messages": HI}
    custom = {"name": "code", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}}
    for path, body in (
        ("/v1/chat/completions", chat | {"guided_json": schema, name: value}),
        (
            "/v1/chat/completions",
            chat | {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", name: value},
        ),
        ("/v1/chat/completions", chat | {"tools": [{"type": "custom", "custom": custom}], name: value}),
        ("/v1/completions", {"prompt": "Hi", "regex": "a+", name: value}),
        ("/v1/responses", {"input": "Hi", "text": text, name: value}),
        ("/v1/messages", chat | {"max_tokens": 9, "output_config": {"format": text["format"]}, name: value}),
        ("/api/chat", chat | {"format": schema, "options": {name: value}}),
    ):
        response = http.post(path, json=body)
        assert response.status_code == 400 and f"{name} cannot be combined with" in response.text, path
    assert server.submits == []


@pytest.mark.parametrize("path", DIALECTS)
def test_defaults_of_a_model_and_what_overrides_them(server: ScriptedServer, http: httpx.Client, path: str) -> None:
    def used(**parameters: object) -> tuple[Sampling, int]:
        server.submits.clear()
        response = ask(http, path, model="advised", seed=1, **parameters)
        assert response.status_code == 200, response.text
        (submit,) = server.submits
        return submit.sampling, submit.max_tokens

    limit = 40 if path == "/v1/messages" else 50
    assert used() == (Sampling(0.3, 0.8, 40, 0.1, 1, 1.1), limit), "the configuration's top_k is above the file's"
    neutral = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 60}
    assert used(**neutral) == (Sampling(1, 1, 0, 0, 1, 1), 60), "an explicit value is above both"
    assert used(top_p=0)[0].top_p == 0
    assert used(temperature=0)[0].temperature == 0
    assert used(repeat_last_n=0)[0].repetition_penalty == 1
    if path != "/v1/messages":
        assert used(max_tokens=-1)[1] > 1000
        response = ask(http, path, model="advised", min_tokens=60)
        assert response.status_code == 400 and "min_tokens (60) is more than the token limit (50)" in response.text


def test_responses_tell_what_was_used(http: httpx.Client) -> None:
    told = ask(http, "/v1/responses", model="advised", temperature=0.5).json()
    assert (told["temperature"], told["top_p"]) == (0.5, 0.8)
    told = ask(http, "/v1/responses").json()
    assert (told["temperature"], told["top_p"]) == (1, 1)
