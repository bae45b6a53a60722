"""Structured output, echo, prompt log-probabilities and `best_of`, over HTTP with a tiny model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.config import Settings
from support.nasty_grammars import chained
from support.server import running
from support.tiers import some

TEXT = "Once upon a time"


@pytest.fixture(scope="module", params=some(["thread", "process"], ["process"]))
def http(request: pytest.FixtureRequest, servable: Path) -> Iterator[httpx.Client]:
    settings = Settings((str(servable),), port=0, max_batch=8, isolation=request.param)
    with running(settings) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = http.post("/v1/completions", json={"prompt": TEXT, "seed": 1, **fields})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **fields})


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


def test_every_choice_matches_the_schema(http: httpx.Client) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    choices = chat(http, response_format=response_format, n=6).json()["choices"]
    choices += complete(http, response_format=response_format, n=2, max_tokens=50, prompt=["a", "b"])["choices"]
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["message"]["content"] if "message" in choice else choice["text"])
        assert 10 <= value["n"] <= 99
        assert isinstance(value["ok"], bool)


def test_a_stream_matches_the_regex(http: httpx.Client) -> None:
    lines = chat(http, guided_regex="[0-9]{5}", stream=True, logprobs=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert len("".join(deltas)) == 5
    assert "".join(deltas).isdigit()
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_truncated_answer_finishes_with_length(http: httpx.Client) -> None:
    [choice] = complete(http, guided_regex="[0-9]{50}", max_tokens=7)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"].isdigit()
    assert len(choice["text"]) == 7


def test_text_that_names_a_control_token_is_text(http: httpx.Client) -> None:
    """The name of the end token ended the answer, and that of another one failed it."""
    for name in ("<|im_end|>", "<|im_start|>"):
        assert chat(http, guided_choice=[f"{name}."]).json()["choices"][0]["message"]["content"] == f"{name}."
        schema = {"type": "object", "properties": {name: {"const": name}}, "required": [name]}
        choice = chat(http, guided_json=schema | {"additionalProperties": False}).json()["choices"][0]
        assert (choice["finish_reason"], json.loads(choice["message"]["content"])) == ("stop", {name: name})


def test_logit_bias_applies_within_the_grammar(http: httpx.Client) -> None:
    digit = ord("7") - ord("!")
    [choice] = complete(http, guided_regex="[0-9]{4}", logit_bias={str(digit): 100, "70": 100})["choices"]
    assert choice["text"] == "7777"


def test_a_refusal_names_the_unsupported_keyword(http: httpx.Client) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "contains": {}}}}
    reply = chat(http, response_format=response_format)
    assert reply.status_code == 400
    assert '"contains"' in reply.json()["error"]["message"]
    special = chat(http, guided_grammar="start: <|nothing|>")
    assert special.status_code >= 400
    assert "nothing" in special.json()["error"]["message"]
    assert chat(http, guided_regex="a").json()["choices"][0]["message"]["content"] == "a"


def wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}


def nested(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {"type": "null"}


HUGE: list[tuple[dict[str, Any], int]] = [
    ({"guided_choice": [f"choice {n}" for n in range(2_100)]}, 200),
    ({"guided_choice": [f"choice {n}" for n in range(10_000)]}, 200),
    ({"guided_json": {"enum": [f"value {n}" for n in range(1_000)]}}, 200),
    ({"guided_json": wide(1_000)}, 200),
    ({"guided_json": wide(10_000)}, 400),
    ({"guided_json": {"$ref": "#"}}, 400),
    ({"guided_json": nested(300)}, 400),
    ({"guided_json": json.dumps(nested(300))}, 400),
    ({"guided_json": chained(3_000)}, 400),
    ({"guided_json": {"type": "integer", "multipleOf": 999_983}}, 400),
    ({"guided_grammar": "start: <[299999]>"}, 400),
]


def test_huge_grammars_are_served_or_refused(http: httpx.Client) -> None:
    started = time.monotonic()
    for fields, status in HUGE:
        reply = chat(http, max_tokens=20, **fields)
        assert reply.status_code == status, (str(fields)[:80], reply.text[:300])
        if status == 400:
            assert reply.json()["error"]["code"] == "invalid_request"
    assert time.monotonic() - started < 60


def test_a_tool_with_a_huge_schema_is_refused(http: httpx.Client) -> None:
    for parameters in (wide(10_000), chained(3_000)):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        reply = chat(http, max_tokens=5, tools=[tool], tool_choice="required")
        assert reply.status_code == 400, reply.text[:300]


def test_small_grammars_do_not_wait_for_slow_ones(http: httpx.Client) -> None:
    """Each slow grammar would take many seconds to compile and is refused after one."""
    done: list[str] = []

    def ask(name: str, **fields: Any) -> int:
        status = chat(http, max_tokens=5, **fields).status_code
        done.append(name)
        return status

    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(ask, "slow", guided_json={"multipleOf": 999_961 + n}) for n in range(4)]
        small = [ask("small", guided_regex=f"[ab]{{{n}}}") for n in range(1, 4)]
        assert small == [200] * 3
        assert [future.result() for future in slow] == [400] * 4
    assert done[-1] == "slow", "a small grammar waited for all slow ones"


def test_grammar_checks_of_disconnected_clients_are_cancelled(servable: Path) -> None:
    """In sequence, these checks would take one second each."""
    with running(Settings((str(servable),), port=0, max_batch=32, isolation="thread")) as server:

        def disconnect(number: int) -> None:
            with pytest.raises(httpx.ReadTimeout):
                body = {"prompt": TEXT, "guided_json": {"multipleOf": 999_961 + number}}
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(10, read=0.2))

        with ThreadPoolExecutor(20) as pool:
            list(pool.map(disconnect, range(20)))
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": TEXT, "guided_regex": "a"}, timeout=60)
        assert reply.json()["choices"][0]["text"] == "a"
        started = time.monotonic()
        while server.call(lambda running: len(running.mill._grammars._checks)):
            time.sleep(0.05)
        assert time.monotonic() - started < 10


def test_echo_begins_with_the_prompt(http: httpx.Client) -> None:
    plain = complete(http, max_tokens=4)["choices"][0]["text"]
    assert complete(http, max_tokens=4, echo=True)["choices"][0]["text"] == TEXT + plain
    none = complete(http, max_tokens=0, echo=True)
    assert none["choices"][0]["text"] == TEXT
    assert none["choices"][0]["finish_reason"] == "length"
    assert none["usage"]["completion_tokens"] == 0
    tokens = [ord(letter) - ord("!") for letter in "Once"]
    assert complete(http, prompt=tokens, max_tokens=0, echo=True)["choices"][0]["text"] == "Once"


def test_an_echo_with_log_probabilities(http: httpx.Client) -> None:
    """As requested by lm-eval: the prompt's tokens and at most one more."""
    logprobs = complete(http, max_tokens=1, echo=True, logprobs=2, temperature=0)["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"][: len(TEXT)]) == TEXT
    assert len(logprobs["tokens"]) == len(TEXT) + 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    assert logprobs["text_offset"] == list(range(len(TEXT) + 1))
    parts = complete(http, prompt="aé", max_tokens=3, echo=True, logprobs=0, temperature=0)["choices"][0]
    assert parts["logprobs"]["text_offset"][:4] == [0, 1, 1, 2]
    assert all(0 <= offset <= len(parts["text"]) for offset in parts["logprobs"]["text_offset"])
    none = complete(http, max_tokens=0, echo=True, logprobs=2)["choices"][0]["logprobs"]
    assert none["token_logprobs"] == logprobs["token_logprobs"][:-1]
    # The prompt's last token has the same log-probability as when it is generated after the rest of the prompt.
    short = complete(http, prompt=TEXT[:-1], max_tokens=1, logprobs=2, logit_bias={"68": 100})["choices"][0]
    assert short["text"] == "e"
    assert short["logprobs"]["token_logprobs"][0] == pytest.approx(none["token_logprobs"][-1], abs=1e-3)


def test_a_streamed_echo(http: httpx.Client) -> None:
    body = {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 3, "stream": True, "temperature": 0}
    lines = http.post("/v1/completions", json=body).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    whole = complete(http, echo=True, logprobs=1, max_tokens=3, temperature=0)["choices"][0]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    values = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    assert values == whole["logprobs"]["token_logprobs"]


def test_log_probabilities_of_prompts(http: httpx.Client) -> None:
    echoed = complete(http, max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]["token_logprobs"]
    [choice] = complete(http, max_tokens=2, prompt_logprobs=2)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert "".join(next(iter(position.values()))["decoded_token"] for position in rest) == TEXT[1:]
    assert [next(iter(position.values()))["logprob"] for position in rest] == pytest.approx(echoed[1:], abs=1e-4)
    assert all({1, 2} <= {option["rank"] for option in position.values()} for position in rest)
    answer = chat(http, prompt_logprobs=0, max_tokens=2).json()
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in chat(http, max_tokens=2).json()


def test_best_of_returns_the_likeliest(http: httpx.Client) -> None:
    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return float(sum(values) / len(values))

    fields = {"prompt": [TEXT, "x"], "max_tokens": 5, "temperature": 1.0, "ignore_eos": True}
    candidates = complete(http, n=4, logprobs=0, **fields)["choices"]
    best = complete(http, n=2, best_of=4, **fields)
    expected = []
    for start in (0, 4):
        expected += [choice["text"] for choice in sorted(candidates[start : start + 4], key=mean, reverse=True)[:2]]
    assert [choice["text"] for choice in best["choices"]] == expected
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in best["choices"]] == [None] * 4
    assert best["usage"]["completion_tokens"] == 40
