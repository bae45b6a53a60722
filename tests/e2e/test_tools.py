"""Tool calls and thoughts with the official client, over a real server whose model says what the test wants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
import tokenizers

from millstream.config import Settings
from millstream.engine.generation.messages import Generate
from millstream.models.source import ModelSource
from support.scripted import ScriptedBackend
from support.server import running
from support.tiny import write_servable

TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}Call with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'tool' %}{{ message.name }}: {% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% else %}<think></think>
{% endif %}"""

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS: list[Any] = [WEATHER, NOW]


class Theatre:
    """A server, its client, and the words that its model will say."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.says: Callable[[Generate], str] = lambda submit: ""
        self.backend: ScriptedBackend | None = None
        self.client: openai.OpenAI
        self.http: httpx.Client

    def make(self, source: ModelSource, settings: Settings) -> ScriptedBackend:
        self.backend = ScriptedBackend(self._script)
        return self.backend

    def _script(self, submit: Generate) -> Sequence[int]:
        return self.tokenizer.encode(self.says(submit) + "<|im_end|>").ids

    def prompt(self, place: int = -1) -> str:
        assert self.backend is not None
        return self.tokenizer.decode(self.backend.submits[place].prompt, skip_special_tokens=False)

    def ask(self, text: str, messages: list[Any] = ASK, **more: Any) -> Any:
        self.says = lambda submit: text
        return self.client.chat.completions.create(model="tiny", messages=messages, **more)


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theatre]:
    folder: Path = write_servable(tmp_path_factory.mktemp("tools") / "tiny")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    # As in the wild: some markers are special tokens, which a detokenizer drops, and some are not.
    tokenizer.add_special_tokens(["<tool_call>", "</think>"])
    tokenizer.add_tokens([tokenizers.AddedToken("</tool_call>", special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    subject = Theatre(tokenizer)
    with running(Settings((str(folder),), port=0), subject.make) as server:
        subject.http = httpx.Client(base_url=server.url, timeout=30)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=30) as client:
            subject.client = client
            yield subject
        subject.http.close()


def streamed(chunks: Any) -> tuple[str, str, list[dict[str, str]], str | None]:
    """What a client puts together."""
    content = reasoning = ""
    calls: list[dict[str, str]] = []
    reason = None
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(calls) and call.type == "function"
                    calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments or ""
            reason = choice.finish_reason or reason
    return content, reasoning, calls, reason


def test_a_whole_answer_with_thoughts_words_and_a_call(theatre: Theatre) -> None:
    answer = theatre.ask(f"They want it.\n</think>\n\nI look.\n{CALL}", tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.reasoning_content == "They want it."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert call.id.startswith("call_") and json.loads(call.function.arguments) == {"city": "Oslo", "days": 3}
    thoughts = len(theatre.tokenizer.encode("They want it.\n</think>").ids)
    assert answer.usage.completion_tokens_details.reasoning_tokens == thoughts
    assert "get_weather" in theatre.prompt() and theatre.prompt().endswith("<think>\n")


def test_content_is_null_beside_calls_alone_and_ids_differ(theatre: Theatre) -> None:
    answer = theatre.ask(f"</think>{CALL}\n{CALL}", tools=TOOLS)
    message = answer.choices[0].message
    assert message.content is None and not hasattr(message, "reasoning_content")
    assert len({call.id for call in message.tool_calls}) == 2


def test_a_stream_tells_the_name_first_and_the_arguments_as_they_come(theatre: Theatre) -> None:
    # The server sends at most 32 steps in one piece, and each letter is a step here.
    long = "Oslo" * 60
    chunks = list(theatre.ask(f"Hm.</think>I look.{CALL.replace('Oslo', long)}{CALL}", tools=TOOLS, stream=True))
    content, reasoning, calls, reason = streamed(chunks)
    assert (content, reasoning, reason) == ("I look.", "Hm.", "tool_calls")
    assert [call["name"] for call in calls] == ["get_weather"] * 2
    assert [json.loads(call["arguments"])["city"] for call in calls] == [long, "Oslo"]
    pieces = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or [] if c.index == 0]
    assert pieces[0].function.name == "get_weather" and len(pieces) > 5, "the arguments came in one piece"
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])


class GetWeather(pydantic.BaseModel):
    city: str
    days: int


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_parse_helpers(theatre: Theatre, stream: bool) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    theatre.says = lambda submit: f"</think>{CALL}"
    if stream:
        with theatre.client.chat.completions.stream(model="tiny", messages=ASK, tools=[tool]) as events:
            kinds = {event.type for event in events}
            answer = events.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
    else:
        answer = theatre.client.chat.completions.parse(model="tiny", messages=ASK, tools=[tool])
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Oslo", days=3)


def test_the_result_goes_into_the_next_prompt(theatre: Theatre) -> None:
    first = theatre.ask(f"</think>{CALL}", tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    answer = theatre.ask("</think>It rains.", [*ASK, first.to_dict(), result], tools=TOOLS)
    assert answer.choices[0].message.content == "It rains."
    assert "<tool_call>get_weather city=Oslo days=3</tool_call>" in theatre.prompt()
    assert "<|im_start|>tool\nget_weather: rain<|im_end|>" in theatre.prompt()


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Os</tool_call>',
        "<tool_call>no call</tool_call>",
        '<tool_call>{"name": "get_weather"',
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_call_is_text(theatre: Theatre, text: str, stream: bool) -> None:
    answer = theatre.ask(f"</think>{text}", tools=TOOLS, stream=stream)
    if stream:
        content, _, _, reason = streamed(answer)
        assert (content, reason) == (text, "stop")
        return
    message = answer.choices[0].message
    assert (message.content, message.tool_calls, answer.choices[0].finish_reason) == (text, None, "stop")


def test_a_call_that_the_limit_cuts_is_text(theatre: Theatre) -> None:
    count = len(theatre.tokenizer.encode(f"</think>{CALL}").ids)
    answer = theatre.ask(f"</think>{CALL}", tools=TOOLS, max_tokens=count - 25)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content.startswith('<tool_call>\n{"name": "get_weather"')
    assert answer.choices[0].message.tool_calls is None


def test_without_tools_or_with_none_a_call_is_text_and_the_prompt_has_no_tools(theatre: Theatre) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = theatre.ask(f"</think>{CALL}", **more).choices[0].message
        assert (message.content, message.tool_calls) == (CALL, None)
        assert "get_weather" not in theatre.prompt()


def test_no_parallel_calls_means_that_the_first_one_ends_the_answer(theatre: Theatre) -> None:
    answer = theatre.ask(f"</think>{CALL}{CALL}{CALL}", tools=TOOLS, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    # A step or two may run before the engine hears that the answer is over.
    assert answer.usage.completion_tokens < len(theatre.tokenizer.encode(f"</think>{CALL}{CALL}").ids)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_call_that_must_come_is_a_grammar(theatre: Theatre, choice: Any) -> None:
    theatre.ask("</think>\n\n" + CALL, tools=TOOLS, tool_choice=choice)
    assert theatre.backend is not None
    grammar = theatre.backend.submits[-1].grammar
    assert grammar is not None and grammar.kind == "lark"
    assert ("get_weather" in grammar.source) == (choice == "required") and "now" in grammar.source
    theatre.ask("</think>Hello.", tools=TOOLS, tool_choice="auto")
    assert theatre.backend.submits[-1].grammar is None


@pytest.mark.parametrize(
    "more",
    [{"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}],
)
def test_thinking_can_be_turned_off(theatre: Theatre, more: dict[str, Any]) -> None:
    answer = theatre.ask("At once.", **more)
    assert theatre.prompt().endswith("<think></think>\n")
    assert answer.choices[0].message.content == "At once."
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_thoughts_that_never_end_are_no_content(theatre: Theatre) -> None:
    content, reasoning, _, reason = streamed(theatre.ask("Well, well", stream=True))
    assert (content, reasoning, reason) == ("", "Well, well", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_closes_the_thoughts_by_force(theatre: Theatre, stream: bool) -> None:
    def says(submit: Generate) -> str:
        prompt = theatre.tokenizer.decode(submit.prompt, skip_special_tokens=False)
        return "It is fine." if prompt.endswith("</think>\n\n") else "and then " * 50

    theatre.says = says
    asked = {"model": "tiny", "messages": ASK, "stream": stream, "extra_body": {"thinking_budget": 20}}
    answer = theatre.client.chat.completions.create(**asked)  # type: ignore[call-overload]
    thoughts = ("and then " * 50)[:20].rstrip()
    if stream:
        assert streamed(answer) == ("It is fine.", thoughts, [], "stop")
        return
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("It is fine.", thoughts)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 20
    assert answer.usage.completion_tokens == 20 + len("It is fine.") + 1
    assert theatre.prompt().endswith(("and then " * 50)[:20] + "\n</think>\n\n")


def test_a_budget_of_nothing_closes_the_thoughts_in_the_prompt(theatre: Theatre) -> None:
    answer = theatre.ask("At once.", extra_body={"thinking_budget": 0})
    assert theatre.prompt().endswith("<think>\n\n</think>\n\n")
    message = answer.choices[0].message
    assert message.content == "At once." and not hasattr(message, "reasoning_content")


def test_a_budget_that_leaves_no_room_ends_the_answer(theatre: Theatre) -> None:
    answer = theatre.ask("and then " * 50, max_tokens=20, extra_body={"thinking_budget": 20})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 20


def test_stop_strings_end_content_but_no_thought_and_no_call(theatre: Theatre) -> None:
    answer = theatre.ask(f"Oslo, I think.</think>{CALL}", tools=TOOLS, stop=["Oslo"])
    assert answer.choices[0].message.tool_calls is not None
    answer = theatre.ask("Oslo.</think>It is in Oslo, I think.", stop=["Oslo"])
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("It is in ", "Oslo.")
    assert answer.choices[0].finish_reason == "stop"


def test_every_token_has_its_log_probability(theatre: Theatre) -> None:
    text = f"Hm.</think>I look.{CALL}"
    answer = theatre.ask(text, tools=TOOLS, logprobs=True)
    shown = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in shown) == text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": "x"}, "tools"),
    ({"tools": ["x"]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]}, "tools[0].function.description"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools[0].function.parameters.type",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 5}}}}]},
        "tools[0].function.parameters.properties",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": "a"}}}]},
        "tools[0].function.parameters.required",
    ),
    ({"tools": [NOW, NOW]}, "tools[1].function.name"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"name": "now"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"thinking_budget": -1}, "thinking_budget"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("body", "param"), BAD)
def test_what_is_wrong_is_said(theatre: Theatre, body: dict[str, Any], param: str) -> None:
    reply = theatre.http.post("/v1/chat/completions", json={"messages": ASK, **body})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
