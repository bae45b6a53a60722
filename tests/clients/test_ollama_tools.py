"""The official `ollama` client calls tools and shows reasoning, on a real server whose model output is scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

from millstream.config import ModelSpec, Settings
from millstream.engine.generation.messages import Generate
from millstream.models.source import ModelSource
from support.scripted import ScriptedBackend
from support.server import running
from support.tiny import write_servable

ollama = pytest.importorskip("ollama", reason="needs the extra `clients`")

TEMPLATE = """{%- if tools %}{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}Call with <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'tool' %}{{ message.name }}: {% endif %}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}"""
ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s", "days": 3}}\n</tool_call>'


def get_weather(city: str, days: int = 1) -> str:
    """The weather of a city.

    Args:
      city: Its name.
      days: How many.
    """
    return f"{days} days of sun in {city}"


class Scripted:
    """A server and the scripted output of its model."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.output = ""
        self.backend: ScriptedBackend | None = None
        self.client: Any = None
        self.url = ""

    def make(self, source: ModelSource, settings: Settings) -> ScriptedBackend:
        self.backend = ScriptedBackend(self._script, vocab=259)
        return self.backend

    def _script(self, submit: Generate) -> Sequence[int]:
        return self.tokenizer.encode(self.output + "<|im_end|>").ids

    def prompt(self) -> str:
        assert self.backend is not None
        return self.tokenizer.decode(self.backend.submits[-1].prompt, skip_special_tokens=False)

    def ask(self, output: str, messages: list[Any] = ASK, **more: Any) -> Any:
        self.output = output
        return self.client.chat("tiny", messages=messages, **more)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = write_servable(tmp_path_factory.mktemp("tools") / "tiny")
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    subject = Scripted(folder)
    with running(Settings((ModelSpec(str(folder)),), port=0), subject.make) as server:
        subject.url = server.url
        with ollama.Client(host=server.url) as subject.client:
            yield subject


def test_the_capabilities_of_the_template(scripted: Scripted) -> None:
    assert scripted.client.show("tiny").capabilities == ["completion", "tools", "thinking"]


def test_a_tool_is_called_and_its_result_sent_back(scripted: Scripted) -> None:
    answer = scripted.ask("I look." + CALL % "Oslo", tools=[get_weather])
    assert answer.message.content.strip() == "I look." and answer.done_reason == "stop"
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo", "days": 3})
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.function.arguments)}
    last = scripted.ask("Sunny.", [*ASK, answer.message, result], tools=[get_weather])
    assert last.message.content == "Sunny." and last.message.tool_calls is None
    assert "<tool_call>get_weather city=Oslo days=3</tool_call>" in scripted.prompt()
    assert "get_weather: 3 days of sun in Oslo" in scripted.prompt()


def test_the_prompt_is_that_of_other_dialects(scripted: Scripted) -> None:
    call = {"id": "call_7", "function": {"name": "get_weather", "arguments": {"city": "Århus", "days": 3}}}
    answer = {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_7", "content": "rain"}
    scripted.ask("Rain.", [*ASK, answer, result], tools=[get_weather])
    prompt = scripted.prompt()
    tools = json.loads(json.dumps([ollama._utils.convert_function_to_tool(get_weather).model_dump(exclude_none=True)]))
    text = {**call, "type": "function", "function": {**call["function"], "arguments": '{"city":"Århus","days":3}'}}
    messages = [*ASK, {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [text]}, result]
    body = {"model": "tiny", "messages": messages, "tools": tools}
    assert httpx.post(f"{scripted.url}/v1/chat/completions", json=body).status_code == 200
    assert scripted.prompt() == prompt


def test_several_calls_in_a_stream(scripted: Scripted) -> None:
    parts = list(scripted.ask(f"{CALL % 'Oslo'}\n{CALL % 'Bern'}", tools=[get_weather], stream=True))
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [call.function.arguments["city"] for call in calls] == ["Oslo", "Bern"]
    assert "tool_call" not in "".join(part.message.content for part in parts)
    assert parts[-1].done and not any(part.done for part in parts[:-1])


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_is_apart_from_the_answer(scripted: Scripted, stream: bool) -> None:
    found = scripted.ask("<think>Let me see.</think>Four.", stream=stream)
    messages = [part.message for part in found] if stream else [found.message]
    assert "".join(message.thinking or "" for message in messages) == "Let me see."
    assert "".join(message.content for message in messages).strip() == "Four."


def test_think_reaches_the_template(scripted: Scripted) -> None:
    assert scripted.ask("Hm.</think>Four.", think=True).message.thinking == "Hm."
    assert scripted.prompt().endswith("<think>\n")
    assert scripted.ask("Four.", think=False).message.content == "Four."
    assert scripted.prompt().endswith("assistant\n")
    scripted.output = "Hm.</think>Four."
    answer = scripted.client.generate("tiny", prompt="2 + 2?", think=True)
    assert (answer.thinking, answer.response) == ("Hm.", "Four.")
