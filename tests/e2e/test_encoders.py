"""Embeddings and reranking over HTTP, beside a chat model in the same server."""

from __future__ import annotations

import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from millstream.config import Settings
from support.encoder_server import PROMPTS
from support.server import RunningServer, running

PATIENCE = 60
HELLO = [{"role": "user", "content": "hi"}]


def post(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE)


def result(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    reply = post(server, path, body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def error(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    reply = post(server, path, body)
    assert reply.status_code == 400, reply.text
    found: dict[str, Any] = reply.json()["error"]
    return found


def vectors(server: RunningServer, inputs: object, **more: Any) -> Any:
    return np.array([each["embedding"] for each in result(server, "/v1/embeddings", input=inputs, **more)["data"]])


def test_models_say_what_they_are(encoders: RunningServer) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{encoders.url}/v1/models", timeout=PATIENCE).json()["data"]}
    assert "completion" in cards["chat"]["capabilities"] and "dimensions" not in cards["chat"]
    assert (cards["embed"]["capabilities"], cards["embed"]["dimensions"]) == (["embedding"], 32)
    assert cards["rank"]["capabilities"] == ["rerank"]
    assert cards["embed"]["context_length"] == 256


def test_a_request_without_a_model_gets_the_first_of_the_kind(encoders: RunningServer) -> None:
    assert result(encoders, "/v1/embeddings", input="mill")["model"] == "embed"
    assert result(encoders, "/v1/rerank", query="mill", documents=["stream"])["model"] == "rank"
    assert result(encoders, "/v1/completions", prompt="mill", max_tokens=1)["model"] == "chat"


@pytest.mark.parametrize(
    ("path", "model", "body", "message"),
    [
        ("/v1/chat/completions", "embed", {"messages": HELLO}, "'embed' is a model for embeddings"),
        ("/v1/completions", "rank", {"prompt": "hi"}, "'rank' is a model for reranking"),
        ("/v1/embeddings", "chat", {"input": "hi"}, "'chat' is a model for generation; this request"),
        ("/v1/embeddings", "rank", {"input": "hi"}, "'rank' is a model for reranking"),
        ("/v1/rerank", "embed", {"query": "a", "documents": ["b"]}, "needs one for reranking"),
        ("/v1/score", "chat", {"text_1": "a", "text_2": "b"}, "needs one for reranking"),
    ],
)  # fmt: skip
def test_asking_a_model_for_what_it_is_not_says_what_it_is(
    encoders: RunningServer, path: str, model: str, body: dict[str, Any], message: str
) -> None:
    found = error(encoders, path, model=model, **body)
    assert message in found["message"] and found["param"] == "model"


def test_one_text_many_texts_and_tokens(encoders: RunningServer) -> None:
    one, many = vectors(encoders, "the mill"), vectors(encoders, ["the mill", "the stream"])
    np.testing.assert_allclose(one[0], many[0], atol=3e-6)
    np.testing.assert_allclose(np.linalg.norm(many, axis=1), 1, atol=1e-6)
    tokens = [2, 4, 5, 3]  # [CLS] the mill [SEP]
    np.testing.assert_allclose(vectors(encoders, tokens)[0], one[0], atol=3e-6)
    np.testing.assert_allclose(vectors(encoders, [tokens, "the mill"]), [one[0]] * 2, atol=3e-6)


def test_usage_counts_all_tokens(encoders: RunningServer) -> None:
    reply = result(encoders, "/v1/embeddings", input=["the mill", [2, 4, 5, 3], "stream"])
    assert reply["usage"] == {"prompt_tokens": 11, "total_tokens": 11}
    assert reply["object"] == "list" and {each["object"] for each in reply["data"]} == {"embedding"}


def test_base64_equals_floats(encoders: RunningServer) -> None:
    data = result(encoders, "/v1/embeddings", input=["mill", "stream"], encoding_format="base64")["data"]
    raw = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in data]
    np.testing.assert_array_equal(raw, vectors(encoders, ["mill", "stream"]).astype(np.float32))


def test_dimensions_cut_and_normalise_again(encoders: RunningServer) -> None:
    whole, cut = vectors(encoders, "mill")[0], vectors(encoders, "mill", dimensions=8)[0]
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    assert len(vectors(encoders, "mill", dimensions=32)[0]) == 32
    found = error(encoders, "/v1/embeddings", model="embed", input="mill", dimensions=33)
    assert found["param"] == "dimensions" and "at most 32" in found["message"]


def test_prompts_are_those_of_the_model(encoders: RunningServer) -> None:
    def near(left: Any, right: Any) -> None:
        np.testing.assert_allclose(left, right, atol=3e-6)

    near(vectors(encoders, "mill", input_type="query"), vectors(encoders, PROMPTS["query"] + "mill"))
    near(vectors(encoders, "mill", input_type="document"), vectors(encoders, PROMPTS["document"] + "mill"))
    near(vectors(encoders, "mill", prompt_name="note"), vectors(encoders, PROMPTS["note"] + "mill"))
    near(vectors(encoders, "mill", input_type="classification"), vectors(encoders, "mill"))
    found = error(encoders, "/v1/embeddings", input="mill", prompt_name="poem")
    assert "no prompt 'poem'. Its prompts: query, document, note" in found["message"]


@pytest.mark.parametrize(("side", "kept"), [("right", "the mill stands"), ("left", "by the stream")])
def test_truncation_as_asked(encoders: RunningServer, side: str, kept: str) -> None:
    long = "the mill stands by the stream"
    cut = vectors(encoders, long, truncate_prompt_tokens=5, truncation_side=side)
    np.testing.assert_allclose(cut, vectors(encoders, kept), atol=3e-6)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input"),
        ({"input": []}, "input", "non-empty list of token ids, or a list of such inputs"),
        ({"input": ["a", 1]}, "input[1]", "must be a string or a non-empty list"),
        ({"input": [[]]}, "input[0]", "non-empty"),
        ({"input": [1, 10**6]}, "input", "token ids are 0 to"),
        ({"input": [1.5]}, "input", "token ids"),
        ({"input": {"text": "a"}}, "input", "must be a string"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "1"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "above 0, or -1"),
        ({"input": "a", "normalize": False}, "normalize", "not supported"),
        ({"input": ["a"] * 2049}, "input", "2049 inputs; at most 2048"),
    ],
)
def test_bad_requests_say_what_would_be_right(
    encoders: RunningServer, body: dict[str, Any], param: str, message: str
) -> None:
    found = error(encoders, "/v1/embeddings", **body)
    assert found["param"] == param and message in found["message"]


def test_2048_inputs_in_their_order(encoders: RunningServer) -> None:
    words = ["mill", "the stream", "water drives the wheel", "bread is baked by the mill by the stream"]
    inputs = [words[number % 4] for number in range(2048)]
    expected = vectors(encoders, words)
    np.testing.assert_allclose(vectors(encoders, inputs), np.tile(expected, (512, 1)), atol=3e-6)


def test_rerank_orders_and_cuts(encoders: RunningServer) -> None:
    documents = ["water drives the wheel", {"text": "bread is baked"}, "the mill"]
    body = {"query": "what drives the mill", "documents": documents}
    results = result(encoders, "/v1/rerank", **body)["results"]
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True) and all(0 < score < 1 for score in scores)
    assert sorted(each["index"] for each in results) == [0, 1, 2] and "document" not in results[0]
    best = result(encoders, "/v1/rerank", **body, top_n=1, return_documents=True)["results"]
    (first,) = best
    assert first["index"] == results[0]["index"]
    text = documents[first["index"]]
    assert first["document"] == {"text": text["text"] if isinstance(text, dict) else text}
    for path in ("/rerank", "/v2/rerank"):
        assert result(encoders, path, **body)["results"] == results
    assert len(result(encoders, "/v1/rerank", **body, top_n=99)["results"]) == 3


def test_scores_of_one_against_many_and_of_pairs(encoders: RunningServer) -> None:
    documents = ["water drives the wheel", "the mill"]
    ranked = result(encoders, "/v1/rerank", query="what is a mill", documents=documents)["results"]
    expected = [each["relevance_score"] for each in sorted(ranked, key=lambda each: each["index"])]
    for path in ("/v1/score", "/score"):
        for first in ("what is a mill", ["what is a mill"] * 2):
            data = result(encoders, path, text_1=first, text_2=documents)["data"]
            assert [each["index"] for each in data] == [0, 1]
            np.testing.assert_allclose([each["score"] for each in data], expected, atol=3e-6)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "1 to 2048 texts"),
        ("/v1/rerank", {"query": "a", "documents": ["b", 3]}, "documents[1]", "must be a text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "1"),
        ("/v1/rerank", {"documents": ["b"]}, "query", "query"),
        ("/v1/rerank", {"query": "mill " * 400, "documents": ["b"]}, "query", "Shorten the query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "x"}, "instruction", "takes no instruction"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", "must have one, or as many"),
        ("/v1/score", {"text_1": [], "text_2": "c"}, None, "1 to 2048 texts"),
    ],
)
def test_bad_pairs_say_what_would_be_right(
    encoders: RunningServer, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    found = error(encoders, path, **body)
    assert message in found["message"], found
    if param is not None:
        assert found["param"] == param


def test_many_clients_of_all_kinds_at_once(encoders: RunningServer) -> None:
    expected = vectors(encoders, ["mill", "the stream"])
    completion = {"prompt": "mill", "max_tokens": 8, "temperature": 0, "model": "chat"}
    said = result(encoders, "/v1/completions", **completion)["choices"][0]["text"]

    def work(number: int) -> None:
        if number % 3 == 0:
            assert result(encoders, "/v1/completions", **completion)["choices"][0]["text"] == said
        elif number % 3 == 1:
            np.testing.assert_allclose(vectors(encoders, ["mill", "the stream"]), expected, atol=3e-6)
        else:
            assert result(encoders, "/v1/rerank", query="mill", documents=["a", "the"] * 20)["results"]

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(36)))


def _active(server: RunningServer, name: str) -> int:
    return int(server.call(lambda mill: mill.mill.hub.card(name).active))


def test_a_client_that_leaves_frees_the_engine(encoders: RunningServer) -> None:
    inputs = ["mill stands by the stream " * 40] * 2048
    left = threading.Event()

    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{encoders.url}/v1/embeddings", json={"input": inputs}, timeout=httpx.Timeout(PATIENCE, read=0.2)
            )
        left.set()

    threading.Thread(target=leave).start()
    assert left.wait(PATIENCE)
    assert len(vectors(encoders, "mill")) == 1, "others are served meanwhile"
    deadline = threading.Event()
    for _ in range(int(PATIENCE / 0.05)):
        if _active(encoders, "embed") == 0:
            break
        deadline.wait(0.05)
    assert _active(encoders, "embed") == 0


def test_a_full_queue_answers_429(three_models: tuple[str, ...]) -> None:
    settings = Settings(models=(three_models[1],), port=0, isolation="thread", max_batch=1, queue=0)
    with running(settings) as server:
        server.call(lambda mill: mill.mill.hub._models["embed"].model.engine.admission.admit([10**6]))  # type: ignore[union-attr]
        reply = post(server, "/v1/embeddings", {"input": "mill"})
        assert reply.status_code in (429, 503) and "retry-after" in reply.headers
        server.call(lambda mill: mill.mill.hub._models["embed"].model.engine.admission.release(10**6))  # type: ignore[union-attr]
        assert len(vectors(server, "mill")) == 1


def test_the_journal_tells_waiting_from_computing(encoders: RunningServer) -> None:
    reply = post(encoders, "/v1/embeddings", {"model": "embed", "input": ["mill", "stream"]})
    assert reply.status_code == 200
    ended = httpx.get(f"{encoders.url}/server/requests").json()["recent"]
    mine = next(each for each in ended if each["id"] == reply.headers["x-request-id"])
    assert [phase["name"] for phase in mine["phases"]][-2:] == ["queue", "prefill"]


def test_ollama_s_options_change_no_embedding(encoders: RunningServer) -> None:
    for options in ({}, {"temperature": 0.5, "num_ctx": 64, "unknown": 1}):
        reply = result(encoders, "/api/embed", model="embed", input="mill", options=options)
        assert reply["embeddings"] == result(encoders, "/api/embed", model="embed", input="mill")["embeddings"]
        old = result(encoders, "/api/embeddings", model="embed", prompt="mill", options=options)
        assert len(old["embedding"]) == 32
