"""Anthropic's own client and LangChain's against real servers: the demo model, a model that sees, and scripted output
for reasoning, whose prompts can then be read."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
import tokenizers
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from millstream.config import Settings
from millstream.engine.generation.messages import Generate
from millstream.models.source import ModelSource
from support.anthropic_types import check_message, checked_events
from support.scripted import ScriptedBackend
from support.server import RunningServer, running
from support.shapes import WHAT, data_uri, draw, some_shapes
from support.tiny import write_servable

SHAPES_VLM = Path(__file__).parent.parent / "assets" / "shapes-vlm"
MILL = "You are the miller of an old water mill, and you answer every question in one short sentence. " * 3
ASK: list[Any] = [{"role": "user", "content": "What does a mill do?"}]
GREEDY = {"temperature": 0}
"""The newest clients no longer have a parameter for it."""
CITY: dict[str, Any] = {"type": "string", "enum": ["Oslo", "Bern"]}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": CITY},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def client_of(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0, timeout=60)


def prompt_tokens(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


# The demo model


@pytest.fixture(scope="module")
def client(demo: RunningServer) -> Iterator[anthropic.Anthropic]:
    with client_of(demo) as found:
        yield found


@pytest.fixture(scope="module")
def model(client: anthropic.Anthropic) -> str:
    (only,) = client.models.list(limit=1000)
    assert client.models.retrieve(only.id).max_input_tokens == only.max_input_tokens
    return only.id


def test_a_message_its_stream_and_its_second_turn(client: anthropic.Anthropic, model: str) -> None:
    first: dict[str, Any] = {"model": model, "max_tokens": 12, "system": MILL, "messages": ASK, "extra_body": GREEDY}
    whole = client.messages.create(**first)
    check_message(whole.to_dict())
    assert whole.model == model and whole.content[0].type == "text" and whole.content[0].text
    assert 0 < whole.usage.output_tokens <= 12
    counted = client.messages.count_tokens(model=model, system=MILL, messages=ASK).input_tokens
    assert counted == prompt_tokens(whole.usage)
    with client.messages.stream(**first) as stream:
        started = next(event for event in stream if event.type == "message_start")
        streamed = stream.get_final_message()
    assert started.message.usage.input_tokens == counted
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.cache_read_input_tokens and prompt_tokens(streamed.usage) == counted
    turns = [*ASK, streamed.to_param(), {"role": "user", "content": "And at night?"}]
    second = client.messages.create(**first | {"messages": turns, "max_tokens": 4})
    assert second.usage.cache_read_input_tokens and second.usage.cache_read_input_tokens > counted // 2


def test_every_event_of_a_beta_stream(demo: RunningServer, model: str) -> None:
    system = [{"type": "text", "text": MILL, "cache_control": {"type": "ephemeral"}}]
    body = {"model": model, "max_tokens": 8, "system": system, "messages": ASK, "stream": True}
    response = httpx.post(f"{demo.url}/v1/messages?beta=true", json=body, timeout=60)
    *_, last, _ = checked_events(response.text)
    assert last["delta"]["stop_reason"] in ("max_tokens", "end_turn") and last["usage"]["input_tokens"] == 1


def test_stop_sequences_and_structured_output(client: anthropic.Anthropic, model: str) -> None:
    schema = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
    answer = client.messages.create(
        model=model,
        max_tokens=32,
        messages=[{"role": "user", "content": "Name a city."}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert answer.content[0].type == "text" and json.loads(answer.content[0].text)["city"] in CITY["enum"]
    stopped = client.messages.create(
        model=model,
        max_tokens=32,
        messages=[{"role": "user", "content": "Name a city."}],
        stop_sequences=['"city"'],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", '"city"')
    assert '"city"' not in stopped.content[0].text  # type: ignore[union-attr]


def test_a_forced_call_and_its_result(client: anthropic.Anthropic, model: str) -> None:
    ask: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
    options: dict[str, Any] = {"model": model, "max_tokens": 60, "tools": [WEATHER], "extra_body": GREEDY}
    choice: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    with client.messages.stream(messages=ask, tool_choice=choice, **options) as stream:
        answer = stream.get_final_message()
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and call.name == "weather" and call.input["city"] in CITY["enum"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain.", "is_error": False}
    turns: list[Any] = [*ask, answer.to_param(), {"role": "user", "content": [result]}]
    last = client.messages.create(messages=turns, **options | {"max_tokens": 4})
    assert last.usage.cache_read_input_tokens and last.stop_reason in ("end_turn", "max_tokens")


def test_errors_are_typed(client: anthropic.Anthropic, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(model="claude-none", max_tokens=8, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model=model, max_tokens=8, messages=ASK, extra_body={"temperature": 7})
    limit = client.models.retrieve(model).max_input_tokens
    assert limit is not None
    long: list[Any] = [{"role": "user", "content": "mill " * (limit + 100)}]
    with pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {limit - 1} maximum"):
        client.messages.create(model=model, max_tokens=8, messages=long)
    assert client.messages.count_tokens(model=model, messages=long).input_tokens > limit


def langchain(server: RunningServer, model: str, **more: Any) -> ChatAnthropic:
    return ChatAnthropic(model_name=model, base_url=server.url, api_key="-", max_retries=0, **more)


def test_langchain(demo: RunningServer, model: str) -> None:
    chat = langchain(demo, model, temperature=0.0, max_tokens_to_sample=8)
    turns = [SystemMessage(MILL), HumanMessage("What does a mill do?")]
    answer = chat.invoke(turns)
    assert answer.text and answer.usage_metadata and answer.usage_metadata["output_tokens"]
    assert "".join(chunk.text for chunk in chat.stream(turns)) == answer.text
    again = chat.invoke([*turns, answer, HumanMessage("And at night?")])
    assert again.usage_metadata and again.usage_metadata["input_token_details"]["cache_read"] > 0


# A model that sees


@pytest.fixture(scope="module")
def seeing() -> Iterator[anthropic.Anthropic]:
    with running(Settings((str(SHAPES_VLM),), port=0, max_batch=4)) as server, client_of(server) as found:
        yield found


def picture(number: int) -> tuple[dict[str, Any], str]:
    """A block with an image, and the name of what it shows."""
    shapes = some_shapes(random.Random(number), 1)
    kind, _, data = data_uri(draw(shapes, 96)).removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}, shapes[0].name


def test_images(seeing: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {"model": "shapes-vlm", "max_tokens": 12, "extra_body": GREEDY}
    for number in range(3):
        block, name = picture(number)
        ask: list[Any] = [{"role": "user", "content": [{"type": "text", "text": WHAT}, block]}]
        answer = seeing.messages.create(messages=ask, **options)
        assert answer.content[0].type == "text" and answer.content[0].text == name
        counted = seeing.messages.count_tokens(model="shapes-vlm", messages=ask).input_tokens
        assert counted == prompt_tokens(answer.usage)
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
        bad = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        seeing.messages.create(messages=[{"role": "user", "content": [bad]}], **options)  # type: ignore[list-item]


# Reasoning

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if tools %}<!-- {{ tools | tojson }} -->{% endif %}{% if enable_thinking is not defined or enable_thinking %}<think>
{% else %}<think></think>
{% endif %}"""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class ScriptedServer:
    """A server whose model writes what the test says."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.output = ""
        self._tokenizer = tokenizer
        self._backend: ScriptedBackend | None = None
        self.server: RunningServer

    def make(self, source: ModelSource, settings: Settings) -> ScriptedBackend:
        self._backend = ScriptedBackend(self._script)
        return self._backend

    def _script(self, submit: Generate) -> Sequence[int]:
        return self._tokenizer.encode(self.output + "<|im_end|>").ids

    @property
    def prompt(self) -> str:
        """The last prompt that the model got."""
        assert self._backend is not None
        return self._tokenizer.decode(self._backend.submits[-1].prompt, skip_special_tokens=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write_servable(tmp_path_factory.mktemp("reasoning") / "tiny", max_position_embeddings=2048)
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (found / "tokenizer_config.json").write_text(json.dumps(settings))
    return found


@pytest.fixture(scope="module")
def scripted(folder: Path) -> Iterator[ScriptedServer]:
    subject = ScriptedServer(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    with running(Settings((str(folder),), port=0), subject.make) as subject.server:
        yield subject


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_reasoning_survives_the_round_trip(scripted: ScriptedServer, display: Any) -> None:
    scripted.output = f"They want the weather.\n</think>\n\nI look.\n{CALL}"
    thinking: Any = {"type": "adaptive", "display": display}
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "tools": [WEATHER], "thinking": thinking}
    with client_of(scripted.server) as client:
        with client.messages.stream(messages=ASK, **options) as stream:
            answer = stream.get_final_message()
        first = scripted.prompt
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        reasoning, _, call = answer.content
        assert reasoning.type == "thinking" and call.type == "tool_use"
        assert reasoning.thinking == ("They want the weather." if display == "summarized" else "")
        assert reasoning.signature and call.input == {"city": "Oslo"}
        assert answer.usage.output_tokens_details and answer.usage.output_tokens_details.thinking_tokens > 0
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain.", "is_error": True}
        turns: list[Any] = [*ASK, answer.to_param(), {"role": "user", "content": [result]}]
        client.messages.create(messages=turns, **options)
    assert first.startswith("<|im_start|>user\nWhat does a mill do?<|im_end|>\n")
    assert "<think>\nThey want the weather.\n</think>\n\nI look." in scripted.prompt
    assert "<|im_start|>tool\nThe call failed: Rain.<|im_end|>" in scripted.prompt


def test_reasoning_can_be_turned_off(scripted: ScriptedServer) -> None:
    scripted.output = "Flour."
    with client_of(scripted.server) as client:
        answer = client.messages.create(
            model="tiny", max_tokens=20, messages=ASK, thinking={"type": "disabled"}, output_config={"effort": "high"}
        )
    assert [block.type for block in answer.content] == ["text"] and scripted.prompt.endswith("<think></think>\n")


def test_langchain_with_reasoning_and_tools(scripted: ScriptedServer) -> None:
    scripted.output = f"They ask.\n</think>\n\nI look.\n{CALL}"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    chat = langchain(scripted.server, "tiny", thinking=thinking, max_tokens_to_sample=2048).bind_tools([WEATHER])
    ask = HumanMessage("How is the weather in Oslo?")
    answer = chat.invoke([ask])
    assert isinstance(answer, AIMessage)
    assert [block["type"] for block in answer.content] == ["thinking", "text", "tool_use"]  # type: ignore[index]
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    chat.invoke([ask, answer, ToolMessage("Rain.", tool_call_id=call["id"])])
    assert "<think>\nThey ask.\n</think>\n\nI look." in scripted.prompt
    assert "<|im_start|>tool\nRain.<|im_end|>" in scripted.prompt


def test_a_real_engine_finds_reasoning_and_calls_in_its_cache(folder: Path) -> None:
    """The model is random: its reasoning ends at the budget, and the tool call is forced."""
    options: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 120,
        "system": "Mill. " * 12,
        "tools": [WEATHER],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 24},
    }
    with running(Settings((str(folder),), port=0, max_batch=2)) as server, client_of(server) as client:
        empty = client.messages.create(messages=ASK, **options | {"max_tokens": 0})
        assert (empty.content, empty.stop_reason, empty.usage.output_tokens) == ([], "max_tokens", 0)
        with client.messages.stream(messages=ASK, **options) as stream:
            answer = stream.get_final_message()
        assert answer.usage.cache_read_input_tokens, "max_tokens 0 fills the cache"
        kinds = [block.type for block in answer.content]
        assert kinds[0] == "thinking" and kinds[-1] == "tool_use" and answer.stop_reason == "tool_use"
        call = answer.content[-1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}  # type: ignore[union-attr]
        turns: list[Any] = [*ASK, answer.to_param(), {"role": "user", "content": [result]}]
        second = client.messages.create(messages=turns, **options)
    assert second.usage.cache_read_input_tokens
    assert second.usage.cache_read_input_tokens > 72, "more than the system prompt"
