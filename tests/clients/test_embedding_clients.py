"""Clients that embed and rank: openai, litellm, LangChain, LlamaIndex, ollama."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from support.server import RunningServer

TEXTS = ["the mill stands by the stream", "bread is baked"]


@pytest.fixture(scope="module")
def expected(encoders: RunningServer) -> Any:
    reply = httpx.post(f"{encoders.url}/v1/embeddings", json={"input": TEXTS, "model": "embed"}, timeout=60)
    return np.array([each["embedding"] for each in reply.json()["data"]])


@pytest.fixture(scope="module")
def client(encoders: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{encoders.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(found), expected, atol=3e-6)


def test_openai(client: openai.OpenAI, expected: Any) -> None:
    """It asks for base64 where the caller does not choose."""
    for chosen in ({}, {"encoding_format": "float"}):
        reply = client.embeddings.create(model="embed", input=TEXTS, **chosen)  # type: ignore[arg-type]
        close([each.embedding for each in reply.data], expected)
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == 13
    short = client.embeddings.create(model="embed", input=TEXTS[0], dimensions=4)
    assert len(short.data[0].embedding) == 4
    with pytest.raises(openai.BadRequestError, match="at most 32") as error:
        client.embeddings.create(model="embed", input=TEXTS, dimensions=64)
    assert error.value.param == "dimensions"
    with pytest.raises(openai.NotFoundError, match="Served: chat, embed, rank"):
        client.embeddings.create(model="text-embedding-3-small", input=TEXTS)


@pytest.mark.filterwarnings("ignore")  # of litellm's own making
def test_litellm(encoders: RunningServer, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its import would ask the network for prices
    litellm = pytest.importorskip("litellm")
    reply = litellm.embedding("openai/embed", input=TEXTS, api_base=f"{encoders.url}/v1", api_key="none")
    ranked = litellm.rerank(
        "hosted_vllm/rank", query="mill", documents=TEXTS, api_base=encoders.url, api_key="none", top_n=1
    )
    close([each["embedding"] for each in reply.data], expected)
    assert len(ranked.results) == 1 and 0 < ranked.results[0]["relevance_score"] < 1


def test_langchain(encoders: RunningServer, expected: Any) -> None:
    from langchain_openai import OpenAIEmbeddings

    settings: dict[str, Any] = {"model": "embed", "base_url": f"{encoders.url}/v1", "api_key": "none", "max_retries": 0}
    with httpx.Client() as http:
        embeddings = OpenAIEmbeddings(check_embedding_ctx_length=False, http_client=http, **settings)
        close(embeddings.embed_documents(TEXTS), expected)
        close(embeddings.embed_query(TEXTS[0]), expected[0])


def test_tokens_of_another_models_tokenizer_are_refused_with_the_remedy(client: openai.OpenAI) -> None:
    """What LangChain sends by default: tokens of OpenAI's tokenizer."""
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        client.embeddings.create(model="embed", input=[[1820, 2606, 13656]])


def test_llama_index(encoders: RunningServer, expected: Any) -> None:
    with warnings.catch_warnings(), httpx.Client() as http:
        warnings.simplefilter("ignore")  # its import warns
        module = pytest.importorskip("llama_index.embeddings.openai_like")
        embedder = module.OpenAILikeEmbedding(
            model_name="embed", api_base=f"{encoders.url}/v1", api_key="none", max_retries=0, http_client=http
        )
        close(embedder.get_text_embedding_batch(TEXTS), expected)
        close(embedder.get_query_embedding(TEXTS[0]), expected[0])


def test_ollama(encoders: RunningServer, expected: Any) -> None:
    import ollama

    with ollama.Client(host=encoders.url) as client:
        check_ollama(client, expected)


def check_ollama(client: Any, expected: Any) -> None:
    import ollama

    reply = client.embed(model="embed", input=TEXTS)
    close(reply.embeddings, expected)
    assert reply.model == "embed" and reply.prompt_eval_count == 13 and reply.total_duration
    close(client.embed(model="embed:latest", input=TEXTS[0]).embeddings, expected[:1])
    close(client.embeddings(model="embed", prompt=TEXTS[0]).embedding, expected[0])
    assert len(client.embed(model="embed", input=TEXTS[0], dimensions=4).embeddings[0]) == 4
    long = "mill " * 400
    assert len(client.embed(model="embed", input=long).embeddings) == 1, "cut by default"
    with pytest.raises(ollama.ResponseError, match="402 tokens"):
        client.embed(model="embed", input=long, truncate=False)
    assert list(client.embed(model="embed", input=[]).embeddings) == [], "only loads the model"
    with pytest.raises(ollama.ResponseError, match="'chat' is a model for generation"):
        client.embed(model="chat", input=TEXTS)
    with pytest.raises(ollama.ResponseError, match="'embed' is a model for embeddings"):
        client.chat(model="embed", messages=[{"role": "user", "content": "hi"}])
    shown = client.show("embed")
    assert shown.capabilities == ["embedding"]


@pytest.mark.filterwarnings("ignore")  # of its own making
@pytest.mark.parametrize("version", ["Client", "ClientV2"])
def test_cohere(encoders: RunningServer, version: str) -> None:
    """Both of its APIs: /v1/rerank and /v2/rerank."""
    cohere = pytest.importorskip("cohere")
    plain = httpx.post(f"{encoders.url}/v1/rerank", json={"query": "mill", "documents": TEXTS}, timeout=60).json()
    with httpx.Client(timeout=60) as http:
        client = getattr(cohere, version)(api_key="none", base_url=encoders.url, httpx_client=http)
        ranked = client.rerank(model="rank", query="mill", documents=TEXTS)
        best = client.rerank(model="rank", query="mill", documents=TEXTS, top_n=1)
        with pytest.raises(cohere.BadRequestError, match="model for embeddings"):
            client.rerank(model="embed", query="mill", documents=TEXTS)
    scores = [(each["index"], each["relevance_score"]) for each in plain["results"]]
    assert [(each.index, each.relevance_score) for each in ranked.results] == scores
    assert ranked.id and len(best.results) == 1
