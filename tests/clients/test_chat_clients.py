"""Clients of the chat API that send answers back as they hold them: litellm, langchain-openai, and openai's `parse`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from support.scripted_server import ScriptedServer, scripted_server

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = {"role": "user", "content": "How is the weather in Oslo?"}


class River(pydantic.BaseModel):
    name: str
    km: int


RIVER = '{"name": "Aare", "km": 288}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(tmp_path_factory.mktemp("clients") / "tiny") as subject:
        yield subject


@pytest.fixture
def stage(server: ScriptedServer) -> ScriptedServer:
    server.prompts.clear()
    server.answer = answer_after_result
    return server


def answer_after_result(prompt: str) -> str:
    """Calls the tool first, and answers once its result is there."""
    return "It is sunny." if "<|im_start|>tool" in prompt else CALL


def check_turns(stage: ScriptedServer) -> None:
    """The second prompt begins with the first, continues with the call as the model wrote it, and has the result."""
    first, second = stage.prompts
    assert second.startswith(first)
    assert second[len(first) :].lstrip().startswith(CALL) and "sunny, 20" in second


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    """Its import warns, and would ask the network for prices."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        module = pytest.importorskip("litellm")
        yield module


@pytest.mark.filterwarnings("ignore")  # of litellm's own making
@pytest.mark.parametrize("stream", [False, True])
def test_litellm_sends_its_message_back(stage: ScriptedServer, litellm: Any, stream: bool) -> None:
    common = {"model": "openai/tiny", "api_base": f"{stage.url}/v1", "api_key": "-", "tools": [WEATHER]}
    answer = litellm.completion(messages=[QUESTION], stream=stream, **common)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "sunny, 20"}
    for sent in (message, message.model_dump()):
        again = litellm.completion(messages=[QUESTION, sent, result], **common)
        assert again.choices[0].message.content == "It is sunny."
        check_turns(stage)
        stage.prompts.pop()


@pytest.mark.filterwarnings("ignore")
def test_litellm_knows_that_the_context_is_exceeded(stage: ScriptedServer, litellm: Any) -> None:
    for length in (5_000, 200_000):
        messages = [{"role": "user", "content": "x" * length}]
        with pytest.raises(litellm.ContextWindowExceededError, match="maximum context length is 4096 tokens"):
            litellm.completion(
                model="openai/tiny", api_base=f"{stage.url}/v1", api_key="-", messages=messages, max_retries=0
            )


@pytest.mark.filterwarnings("ignore")
def test_langchain_calls_a_tool_and_parses_output(stage: ScriptedServer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chat_models = pytest.importorskip("langchain_openai")
        from langchain_core.messages import HumanMessage, ToolMessage
    model = chat_models.ChatOpenAI(model="tiny", base_url=f"{stage.url}/v1", api_key="-", max_retries=0)
    with_tools = model.bind_tools([WEATHER])
    question = HumanMessage(QUESTION["content"])
    answer = with_tools.invoke([question])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    result = ToolMessage([{"type": "text", "text": "sunny, 20"}], tool_call_id=call["id"])
    assert with_tools.invoke([question, answer, result]).content == "It is sunny."
    check_turns(stage)
    whole = None
    for chunk in with_tools.stream([question]):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.tool_calls[0]["args"] == {"city": "Oslo"}
    stage.answer = RIVER
    structured = model.with_structured_output(River)
    assert structured.invoke("Name a river.") == River(name="Aare", km=288)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own `parsed`
def test_openai_parse_sends_its_message_back(stage: ScriptedServer) -> None:
    with openai.OpenAI(base_url=f"{stage.url}/v1", api_key="-", max_retries=0) as client:
        stage.answer = RIVER
        ask: list[Any] = [{"role": "user", "content": "Name a river."}]
        message = client.chat.completions.parse(model="tiny", messages=ask, response_format=River).choices[0].message
        assert message.parsed == River(name="Aare", km=288)
        ask += [message, {"role": "user", "content": "Another one."}]
        client.chat.completions.parse(model="tiny", messages=ask, response_format=River)
        assert stage.prompts[1].startswith(stage.prompts[0]) and RIVER in stage.prompts[1]
        stage.prompts.clear()
        stage.answer = answer_after_result
        tool = openai.pydantic_function_tool(Weather, name="weather")
        called = client.chat.completions.parse(model="tiny", messages=[QUESTION], tools=[tool]).choices[0].message
        assert called.tool_calls is not None
        assert called.tool_calls[0].function.parsed_arguments == Weather(city="Oslo")
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sunny, 20"}
        turns: list[Any] = [QUESTION, called, result]
        assert client.chat.completions.create(model="tiny", messages=turns).choices[0].message.content == "It is sunny."


class Weather(pydantic.BaseModel):
    city: str
