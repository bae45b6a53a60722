"""openai-agents over both of OpenAI's text APIs: an agent calls a function and answers with its result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)

from millstream.config import Settings
from millstream.engine.generation.messages import Generate
from millstream.models.source import ModelSource
from support.scripted import ScriptedBackend
from support.server import RunningServer, running
from support.tiny import write_servable

TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}Call with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
QUIET = RunConfig(tracing_disabled=True)


class Script:
    """The output of the model: a call until there is a result, then an answer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.prompts: list[str] = []

    def make(self, source: ModelSource, settings: Settings) -> ScriptedBackend:
        return ScriptedBackend(self._answer)

    def _answer(self, submit: Generate) -> Sequence[int]:
        prompt = self._tokenizer.decode(submit.prompt, skip_special_tokens=False)
        self.prompts.append(prompt)
        text = "It is 20 degrees." if "<|im_start|>tool" in prompt else f"Let me see.\n{CALL}"
        return self._tokenizer.encode(f"{text}<|im_end|>").ids


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Script]]:
    folder: Path = write_servable(tmp_path_factory.mktemp("agents") / "tiny")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    script = Script(tokenizer)
    with running(Settings((str(folder),), port=0), script.make) as server:
        yield server, script


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"20 degrees in {city}"


async def run(server: RunningServer, api: str, *, streamed: bool) -> Any:
    model = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=30) as client:
        agent = Agent(
            name="Miller",
            instructions="Answer briefly.",
            tools=[weather],
            model=model("tiny", client),
            model_settings=ModelSettings(temperature=0.0),
        )
        if not streamed:
            return await Runner.run(agent, "How is the weather in Oslo?", run_config=QUIET)
        result = Runner.run_streamed(agent, "How is the weather in Oslo?", run_config=QUIET)
        async for _ in result.stream_events():
            pass
        return result


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", ["responses", "chat"])
def test_an_agent_with_a_function(stage: tuple[RunningServer, Script], api: str, streamed: bool) -> None:
    server, script = stage
    script.prompts.clear()
    result = asyncio.run(run(server, api, streamed=streamed))
    assert result.final_output == "It is 20 degrees."
    assert [type(item).__name__ for item in result.new_items] == [
        "MessageOutputItem",
        "ToolCallItem",
        "ToolCallOutputItem",
        "MessageOutputItem",
    ]
    first, second = script.prompts
    assert second.startswith(first) and "20 degrees in Oslo" in second  # the prefix stays


def test_both_apis_give_the_same_prompts(stage: tuple[RunningServer, Script]) -> None:
    server, script = stage
    prompts = []
    for api in ("responses", "chat"):
        script.prompts.clear()
        asyncio.run(run(server, api, streamed=False))
        prompts.append(list(script.prompts))
    assert prompts[0] == prompts[1]
