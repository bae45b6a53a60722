"""Real weights through the whole server: embeddings against NumPy, scores against ONNX Runtime."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from millstream.config import Settings
from support import numpy_encoders
from support.numpy_encoders import Weights, unit
from support.real_encoders import scores_by_onnx
from support.server import RunningServer, running

TEXTS = (
    "The cat sits on the mat.",
    "A kitten is sitting on a rug.",
    "Stocks fell sharply on Tuesday.",
    "Shares dropped a lot this Tuesday.",
    "",
    "水車は小川のそばにあります。 🌊",
    "The mill stands by the stream, and the stream turns the mill. " * 6,
)
QUERIES = ("What drives a water mill?", "What is a mill?", "how did stocks do")
DOCUMENTS = (
    "The wheel of a water mill is turned by the stream that flows below it.",
    "Bread is baked in an oven.",
    "Windmills are driven by wind, water mills by water.",
    "The stock market fell on Tuesday.",
    "My cat sleeps all day.",
    "A mill is a machine or building for grinding grain into flour.",
)


@pytest.fixture(scope="module")
def server(minilm: Path, cross_encoder: Path) -> Iterator[RunningServer]:
    # Batches as the calibration would choose them depend on what else this machine does.
    settings = Settings(models=(str(minilm), str(cross_encoder)), port=0, disabled=frozenset({"calibration"}))
    with running(settings) as server:
        yield server


def post(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


def vectors(server: RunningServer, inputs: list[str], **more: Any) -> Any:
    data = post(server, "/v1/embeddings", input=inputs, **more)["data"]
    assert [each["index"] for each in data] == list(range(len(inputs)))
    return np.array([each["embedding"] for each in data])


def test_minilm_agrees_with_an_independent_computation(server: RunningServer, minilm: Path) -> None:
    config = json.loads((minilm / "config.json").read_text())
    weights = Weights(load_file(minilm / "model.safetensors"))
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    found = vectors(server, list(TEXTS))
    for text, vector in zip(TEXTS, found, strict=True):
        expected = unit(numpy_encoders.bert(config, weights, tokenizer.encode(text).ids).mean(0))
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_a_batch_of_mixed_lengths_equals_each_alone(server: RunningServer) -> None:
    alone = np.concatenate([vectors(server, [text]) for text in TEXTS])
    np.testing.assert_allclose(vectors(server, list(TEXTS)), alone, atol=3e-6)


def test_texts_that_mean_the_same_are_near(server: RunningServer) -> None:
    cat, kitten, stocks, shares = vectors(server, list(TEXTS[:4]))
    assert cat @ kitten > 0.55 and stocks @ shares > 0.5
    assert cat @ stocks < 0.2


def test_base64_equals_floats(server: RunningServer) -> None:
    encoded = post(server, "/v1/embeddings", input=list(TEXTS), encoding_format="base64")["data"]
    raw = np.array([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in encoded])
    np.testing.assert_array_equal(raw, vectors(server, list(TEXTS)).astype(np.float32))


def test_more_tokens_than_the_author_allows_are_an_error_or_cut(server: RunningServer) -> None:
    long = "mill " * 600
    reply = httpx.post(f"{server.url}/v1/embeddings", json={"input": ["short", long]}, timeout=60)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "input"
    assert "input 1 has 602 tokens" in error["message"] and "truncate_prompt_tokens" in error["message"]
    cut = vectors(server, [long], truncate_prompt_tokens=-1)
    np.testing.assert_allclose(cut, vectors(server, [long], truncate=True), atol=1e-6)


def test_documents_are_ordered_as_onnx_runtime_does(server: RunningServer, cross_encoder: Path) -> None:
    for query in QUERIES:
        expected = scores_by_onnx(cross_encoder / "float.onnx", query, DOCUMENTS)
        results = post(server, "/v1/rerank", query=query, documents=list(DOCUMENTS))["results"]
        assert [each["index"] for each in results] == sorted(range(len(DOCUMENTS)), key=lambda n: -expected[n])
        scores = [each["relevance_score"] for each in sorted(results, key=lambda each: each["index"])]
        np.testing.assert_allclose(scores, expected, atol=1e-5)
        # As published, it rounds activations to 8 bits: near ties may change places.
        original = scores_by_onnx(cross_encoder / "model.onnx", query, DOCUMENTS)
        np.testing.assert_allclose(scores, original, atol=0.1)
