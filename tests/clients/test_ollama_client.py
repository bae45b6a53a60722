"""The official `ollama` client against a real server: the demo model, and a tiny one that is loaded on use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest

from millstream.config import ModelSpec, Settings
from millstream.errors import ModelError
from millstream.models.source import resolve
from support.server import RunningServer, running
from support.tiny_gguf import write_gguf

ollama = pytest.importorskip("ollama", reason="needs the extra `clients`")

DEMO = "smollm2-135m-instruct"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "Name one river."}]
GREEDY = {"temperature": 0, "num_predict": 4}


class River(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    km: int = pydantic.Field(ge=0, le=99)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    try:
        resolve(None, report=print)
    except ModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs the demo model, which cannot be fetched: {error.message}")
    tiny = write_gguf(tmp_path_factory.mktemp("ollama") / "tiny.gguf")
    models = (ModelSpec(None), ModelSpec(str(tiny), load="use", aliases=("small",)))
    with running(Settings(models, port=0, max_batch=4)) as subject:
        yield subject


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Any]:
    with ollama.Client(host=server.url) as subject:
        yield subject


@pytest.fixture(scope="module")
def openai_chat(server: RunningServer) -> Any:
    """The same greedy request, by OpenAI's chat API."""

    def ask(messages: list[dict[str, Any]]) -> Any:
        body = {"model": DEMO, "messages": messages, "temperature": 0, "max_tokens": 4}
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()

    return ask


def test_a_model_that_is_not_loaded_is_described(client: Any) -> None:
    demo, tiny = client.list().models
    assert (demo.model, tiny.model) == (DEMO, "tiny")
    assert (demo.details.family, demo.details.quantization_level, demo.details.format) == ("llama", "Q4_1", "gguf")
    shown = client.show("small:latest")
    assert (shown.details.family, shown.details.quantization_level) == ("llama", "F32")
    assert shown.modelinfo["llama.context_length"] == 256 and "<|im_start|>" in shown.template
    assert shown.capabilities == ["completion"]
    assert tiny.size > 100_000 and tiny.details.parameter_size
    assert [model.model for model in client.ps().models] == [DEMO], "nothing was loaded for that"


def test_a_chat_whole_and_streamed(client: Any, openai_chat: Any) -> None:
    whole = client.chat(DEMO, messages=ASK, options=GREEDY)
    parts = list(client.chat(f"{DEMO}:latest", messages=ASK, options=GREEDY, stream=True))
    assert whole.message.content and whole.message.content == "".join(part.message.content for part in parts)
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last.eval_count, last.done_reason) == (4, "length")
    assert 0 < last.load_duration + last.prompt_eval_duration + last.eval_duration == last.total_duration
    other = openai_chat(ASK)
    assert other["choices"][0]["message"]["content"] == whole.message.content
    assert other["usage"]["prompt_tokens"] == whole.prompt_eval_count == last.prompt_eval_count


def test_the_next_turn_finds_its_prefix_whatever_the_dialect(client: Any, openai_chat: Any) -> None:
    first = client.chat(DEMO, messages=[{"role": "system", "content": "You know rivers. " * 12}, *ASK], options=GREEDY)
    system = {"role": "system", "content": "You know rivers. " * 12}
    turn = [system, *ASK, first.message.model_dump(exclude_none=True), {"role": "user", "content": "Another one."}]
    second = client.chat(DEMO, messages=turn, options=GREEDY)
    other = openai_chat(turn)
    assert other["choices"][0]["message"]["content"] == second.message.content
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] > first.prompt_eval_count // 2


def test_a_prompt(client: Any, server: RunningServer) -> None:
    answer = client.generate(DEMO, prompt=ASK[0]["content"], options=GREEDY)
    assert answer.response == client.chat(DEMO, messages=ASK, options=GREEDY).message.content
    system = client.generate(DEMO, prompt="Hi", system="You are a pirate.", options={"num_predict": 1})
    assert system.prompt_eval_count < answer.prompt_eval_count, "it replaces the template's own system message"
    raw = "".join(part.response for part in client.generate(DEMO, "One, two,", raw=True, options=GREEDY, stream=True))
    body = {"model": DEMO, "prompt": "One, two,", "temperature": 0, "max_tokens": 4}
    plain = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert raw == plain["choices"][0]["text"]


def test_structured_output(client: Any) -> None:
    answer = client.chat(DEMO, messages=ASK, format=River.model_json_schema(), options={"temperature": 0})
    River.model_validate_json(answer.message.content)


def test_log_probabilities(client: Any) -> None:
    answer = client.chat(DEMO, messages=ASK, options=GREEDY, logprobs=True, top_logprobs=2)
    assert "".join(each.token for each in answer.logprobs) == answer.message.content
    assert all(each.top_logprobs[0].logprob == each.logprob and len(each.top_logprobs) == 2 for each in answer.logprobs)


def test_a_stop_string(client: Any) -> None:
    whole = client.generate("tiny", prompt="a", options={"temperature": 0, "num_predict": 12}).response
    stop = whole[2]
    cut = client.generate("tiny", prompt="a", options={"temperature": 0, "num_predict": 12, "stop": [stop]})
    assert (cut.response, cut.done_reason) == (whole.partition(stop)[0], "stop")


def test_how_long_a_model_stays_loaded(client: Any) -> None:
    def loaded() -> dict[str, Any]:
        return {model.model: model for model in client.ps().models}

    options = {"num_predict": 1}
    client.generate("tiny", prompt="a", keep_alive="10m", options=options)
    left = loaded()["tiny"].expires_at - datetime.now(UTC)
    assert 500 < left.total_seconds() < 601
    client.generate("tiny", prompt="a", options=options)
    assert loaded()["tiny"].expires_at.year < 2300, "a request that says nothing changes nothing"
    assert client.generate("tiny", keep_alive=0).done_reason == "unload"
    assert "tiny" not in loaded()
    assert client.generate("tiny").done_reason == "load"
    assert loaded()["tiny"].expires_at.year == 2318, "the next load begins anew"
    client.chat("tiny", messages=ASK, keep_alive=0, options=options)
    for _ in range(100):
        if "tiny" not in loaded():
            break
        asyncio.run(asyncio.sleep(0.05))
    assert loaded().keys() == {DEMO}


def test_errors(client: Any) -> None:
    cases: list[tuple[int, str, Any]] = [
        (404, "model 'nope' not found", lambda: client.chat("nope", messages=ASK)),
        (400, "context", lambda: client.generate("tiny", prompt="long " * 200)),
        (400, r"messages\[0\].images\[0\]", lambda: client.chat("tiny", [{**ASK[0], "images": [b"x" * 20]}])),
        (400, "options.temperature", lambda: client.chat(DEMO, messages=ASK, options={"temperature": -1})),
        (404, "does not download", lambda: client.pull("llama3")),
        (400, "embeddings", lambda: client.embed(DEMO, input="hi")),
        (400, "delete", lambda: client.delete(DEMO)),
    ]
    for status, words, call in cases:
        with pytest.raises(ollama.ResponseError, match=words) as caught:
            call()
        assert caught.value.status_code == status
    with pytest.raises(ollama.ResponseError, match="not found"):
        list(client.chat("nope", messages=ASK, stream=True))


def test_the_async_client(server: RunningServer) -> None:
    async def talk() -> tuple[str, str, list[str | None]]:
        async with ollama.AsyncClient(host=server.url) as subject:
            parts = [part async for part in await subject.chat(DEMO, messages=ASK, options=GREEDY, stream=True)]
            whole = await subject.generate(DEMO, prompt=ASK[0]["content"], options=GREEDY)
            pulled = [part.status async for part in await subject.pull(DEMO, stream=True)]
            return "".join(part.message.content for part in parts), whole.response, pulled

    streamed, whole, pulled = asyncio.run(talk())
    assert streamed == whole and pulled[-1] == "success"


def test_a_server_with_keys_and_models_that_cannot_be_described(tmp_path: Path) -> None:
    sources = [str(write_gguf(tmp_path / "tiny.gguf")), str(tmp_path / "gone.gguf"), "not--valid/na..me", "org/absent"]
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no header")
    models = tuple(ModelSpec(source, load="use") for source in [*sources, str(tmp_path / "damaged")])
    with running(Settings(models, port=0, api_keys=("a-key",), cache_dir=tmp_path)) as server:
        with ollama.Client(host=server.url) as subject, pytest.raises(ollama.ResponseError, match="API key") as caught:
            subject.list()
        assert caught.value.status_code == 401
        with ollama.Client(host=server.url, headers={"authorization": "Bearer a-key"}) as subject:
            names = [model.model for model in subject.list().models]
            assert names == ["tiny", str(tmp_path / "gone.gguf"), "not--valid/na..me", "org/absent", "damaged"]
            assert [subject.show(name).capabilities for name in names] == [["completion"]] * 5
