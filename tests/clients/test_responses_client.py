"""The official OpenAI client and the Responses API, on a real server with a tiny random model: what it writes does not
matter, and grammars force it where it does."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall

from millstream.api.background import BackgroundTasks
from millstream.config import ModelSpec, Settings
from millstream.service.store.folder import RecordFolder
from support.responses import check_events
from support.scripted import ScriptedBackend
from support.server import running
from support.tiny import write_servable

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
LONG = "You are a miller. " * 20


class River(pydantic.BaseModel):
    name: Literal["Aare", "Rhine"]
    dry: bool


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = write_servable(tmp_path_factory.mktemp("responses") / "tiny", max_position_embeddings=4096)
    model = ModelSpec(str(folder), name="tiny", max_tokens=24)
    with (
        running(Settings((model,), port=0, max_batch=8, isolation="thread")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60) as subject,
    ):
        yield subject


def test_create_and_retrieve(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="hi", max_output_tokens=8, metadata={"a": "b"})
    assert response.usage is not None and response.usage.output_tokens <= 8
    again = client.responses.retrieve(response.id)
    assert again == response and again.metadata == {"a": "b"} and again.model == "tiny"


def test_the_events_of_a_stream_accumulate_to_its_last_response(client: openai.OpenAI) -> None:
    texts: dict[str, str] = {}
    events = []
    with client.responses.stream(model="tiny", input="hi", temperature=0) as stream:
        for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                texts[event.item_id] = texts.get(event.item_id, "") + event.delta
                assert event.snapshot == texts[event.item_id]
    final = events[-1].response  # type: ignore[union-attr]
    assert isinstance(final, Response) and final.status in ("completed", "incomplete")
    assert final.output_text == "".join(texts.values())
    whole = client.responses.create(model="tiny", input="hi", temperature=0)
    assert whole.output_text == final.output_text


def test_raw_events(client: openai.OpenAI) -> None:
    events = list(
        client.responses.create(
            model="tiny", input="hi", stream=True, tools=[TOOL], tool_choice="required", max_output_tokens=200
        )
    )
    check_events([event.to_dict() for event in events])


def test_parse(client: openai.OpenAI) -> None:
    response = client.responses.parse(model="tiny", input="Name a river.", text_format=River, max_output_tokens=200)
    assert isinstance(response.output_parsed, River)
    with client.responses.stream(model="tiny", input="Name one.", text_format=River, max_output_tokens=200) as stream:
        assert isinstance(stream.get_final_response().output_parsed, River)


def test_a_function_call_and_its_output(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="tiny",
        input="hi",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        max_output_tokens=200,
    )
    (call,) = [item for item in first.output if isinstance(item, ResponseFunctionToolCall)]
    assert json.loads(call.arguments)["city"] in ("Bern", "Oslo")
    items: Any = [{"role": "user", "content": "hi"}, *first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    second = client.responses.create(model="tiny", input=items, tools=[TOOL], max_output_tokens=8)
    assert second.status in ("completed", "incomplete")


def test_a_chain_finds_its_prefix_in_the_cache(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", instructions=LONG, input="hi")
    second = client.responses.create(model="tiny", instructions=LONG, input="more", previous_response_id=first.id)
    assert first.usage is not None and second.usage is not None
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + 8
    assert second.usage.input_tokens_details.cached_tokens > len(LONG)


def test_the_same_tokens_as_by_the_chat_api(client: openai.OpenAI) -> None:
    """So a conversation may go on in the other API, and finds its prefix there."""
    history: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "hu"},
    ]
    response = client.responses.create(model="tiny", instructions="Be kind.", input=history, temperature=0)
    messages: Any = [{"role": "system", "content": "Be kind."}, *history]
    chat = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=24)
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.output_text == chat.choices[0].message.content


def test_background(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="hi", background=True)
    assert response.status == "queued"
    deadline = time.monotonic() + 30
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        response = client.responses.retrieve(response.id)
    assert response.status in ("completed", "incomplete")
    events = list(client.responses.retrieve(response.id, stream=True))
    check_events([event.to_dict() for event in events])
    rest = list(client.responses.retrieve(response.id, stream=True, starting_after=3))
    assert rest == events[4:]


def test_cancel(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="hi", background=True, max_output_tokens=1500)
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(response.id).status == "cancelled"
    *_, last = client.responses.retrieve(response.id, stream=True)
    assert str(last.type) == "response.cancelled"


def test_input_tokens_and_items(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="tiny", input="How are you?", instructions="Be kind.")
    response = client.responses.create(model="tiny", input="How are you?", instructions="Be kind.", max_output_tokens=1)
    assert response.usage is not None and counted.input_tokens == response.usage.input_tokens
    (item,) = client.responses.input_items.list(response.id)
    assert item.type == "message" and item.content[0].to_dict() == {"type": "input_text", "text": "How are you?"}


def test_delete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="hi", max_output_tokens=1)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        client.responses.retrieve(response.id)


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="tiny", input="hi", previous_response_id="resp_x")
    assert missing.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="none", input="hi")
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(model="tiny", input="x" * 100_000)
    assert long.value.code == "context_length_exceeded"
    kept = client.responses.create(
        model="tiny",
        input=[{"role": "user", "content": "x" * 100_000}, {"role": "user", "content": "hi"}],
        truncation="auto",
        max_output_tokens=1,
    )
    assert kept.usage is not None and kept.usage.input_tokens < 100


PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "regex", "definition": "a{3}b"},
}


def test_a_custom_tool(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="tiny",
        input="hi",
        tools=[PATCH],
        tool_choice={"type": "custom", "name": "patch"},
        parallel_tool_calls=False,
        max_output_tokens=200,
    )
    (call,) = [item for item in response.output if item.type == "custom_tool_call"]
    assert call.name == "patch" and call.input == "aaab"


class Watched(BackgroundTasks):
    closed = 0

    async def close(self) -> None:
        await super().close()
        Watched.closed += 1


def test_a_server_that_stops_ends_its_background_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.server.BackgroundTasks", Watched)
    folder = write_servable(tmp_path / "tiny", max_position_embeddings=100_000)
    endless = ScriptedBackend(lambda submit: [72], vocab=259, context_length=100_000)
    settings = Settings((str(folder),), port=0, grace=0.1, store_dir=tmp_path / "store")
    with running(settings, lambda source, settings: endless) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60) as client:
            response = client.responses.create(model="tiny", input="hi", background=True)
            while client.responses.retrieve(response.id).status == "queued":
                time.sleep(0.01)
        server.stop_soon()
        assert server.join() == (0, True) and Watched.closed == 1
    record = RecordFolder(tmp_path / "store" / "records", max_bytes=10**6, max_age=60.0).get(response.id)
    assert record is not None and b'"status":"failed"' in record, "a later server knows how it ended"
