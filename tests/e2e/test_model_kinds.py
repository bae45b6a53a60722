"""`kind` of a model: a chat model used for embeddings because the configuration says so, and kinds that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from millstream.config import ModelSpec, Settings
from support.server import RunningServer, running
from support.tiny import write_model, write_servable, write_tokenizer
from support.tiny_encoders import write_encoder
from support.tiny_gguf import write_gguf

PATIENCE = 60
TEXTS = ["mill", "the stream turns the wheel of the mill", "a"]
OTHER_FAMILY = "olmo2"
"""A language model of mlx-lm that nobody publishes as an embedding model."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("kinds")
    other = write_model(root / "other", OTHER_FAMILY, vocab_size=259)
    write_tokenizer(other)
    return {
        "llama": write_servable(root / "llama"),
        "other": other,
        "gguf": write_gguf(root / "tiny.gguf"),
        "bert": write_encoder(root / "bert", "bert", tokenizer=True),
    }


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[RunningServer]:
    specs = (
        ModelSpec(str(folders["llama"]), "chat"),
        ModelSpec(str(folders["llama"]), "vectors", kind="embedding"),
        ModelSpec(str(folders["other"]), "other", kind="embedding", load="use"),
        ModelSpec(str(folders["gguf"]), "gguf", kind="embedding", load="use"),
        ModelSpec(str(folders["bert"]), "wrong-folder", kind="generation", load="use"),
        ModelSpec(str(folders["llama"]), "wrong-rerank", kind="rerank", load="use"),
        ModelSpec(str(folders["gguf"]), "wrong-file", kind="rerank", load="use"),
    )
    with running(Settings(models=specs, port=0, isolation="thread")) as server:
        yield server


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE)


def vectors(server: RunningServer, model: str) -> Any:
    reply = post(server, "/v1/embeddings", model=model, input=TEXTS)
    assert reply.status_code == 200, reply.text
    return np.array([each["embedding"] for each in reply.json()["data"]])


@pytest.mark.parametrize(("name", "folder"), [("vectors", "llama"), ("other", "other")])
def test_a_chat_model_embeds_by_its_last_token(
    server: RunningServer, folders: dict[str, Path], name: str, folder: str
) -> None:
    model, _ = load_model(folders[folder])
    alphabet = sorted(_alphabet())
    for vector, text in zip(vectors(server, name), TEXTS, strict=True):
        tokens = [alphabet.index(letter) for letter in text.replace(" ", "Ġ")]
        last = np.array(model.model(mx.array([tokens]))[0, -1])
        np.testing.assert_allclose(vector, last / np.linalg.norm(last), atol=1e-5)


def _alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return list(pre_tokenizers.ByteLevel.alphabet())


def test_a_gguf_file_embeds(server: RunningServer) -> None:
    found = vectors(server, "gguf")
    assert found.shape == (3, 64)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert abs(found[0] @ found[1]) < 0.999, "texts that differ have vectors that differ"


def test_models_say_the_kind_that_was_set(server: RunningServer) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{server.url}/v1/models", timeout=PATIENCE).json()["data"]}
    assert cards["vectors"]["capabilities"] == cards["gguf"]["capabilities"] == ["embedding"]
    assert "completion" in cards["chat"]["capabilities"]
    reply = post(server, "/v1/completions", model="vectors", prompt="a")
    assert reply.status_code == 400 and "embedding" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("wrong-folder", "kind = 'generation': it is a 'bert' model, which can be of kind embedding, rerank"),
        ("wrong-rerank", "kind = 'rerank': it is a 'llama' model, which can be of kind embedding, generation"),
        ("wrong-file", "kind = 'rerank': it is a 'gguf' model, which can be of kind embedding, generation"),
    ],
)
def test_a_kind_that_a_model_cannot_be_is_an_error_that_says_so(server: RunningServer, model: str, words: str) -> None:
    path = "/v1/completions" if model == "wrong-folder" else "/v1/rerank"
    body = {"prompt": "a"} if model == "wrong-folder" else {"query": "a", "documents": ["b"]}
    reply = post(server, path, model=model, **body)
    assert reply.status_code >= 400 and words in reply.text, reply.text
    assert vectors(server, "vectors").shape[0] == 3, "the others go on"
