"""Tool calls and reasoning with the official client, on a real server whose model output is scripted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import llguidance
import openai
import pydantic
import pytest
import tokenizers

from millstream.config import Settings
from millstream.engine.generation.messages import Generate
from millstream.errors import BadRequest
from millstream.models.source import ModelSource
from millstream.server import MillServer
from millstream.types import ChatPrompt, Delta, GenerationRequest, Grammar, ToolUse
from support.scripted import ScriptedBackend
from support.server import RunningServer, running
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


class ScriptedServer:
    """A server, its clients, and the scripted output of its model."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.output: Callable[[Generate], str] = lambda submit: ""
        self.backend: ScriptedBackend | None = None
        self.client: openai.OpenAI
        self.http: httpx.Client
        self.server: RunningServer

    def make(self, source: ModelSource, settings: Settings) -> ScriptedBackend:
        self.backend = ScriptedBackend(self._script)
        return self.backend

    def _script(self, submit: Generate) -> Sequence[int]:
        return self.tokenizer.encode(self.output(submit) + "<|im_end|>").ids

    def prompt(self, index: int = -1) -> str:
        assert self.backend is not None
        return self.tokenizer.decode(self.backend.submits[index].prompt, skip_special_tokens=False)

    def ask(self, text: str, messages: list[Any] = ASK, **more: Any) -> Any:
        self.output = lambda submit: text
        return self.client.chat.completions.create(model="tiny", messages=messages, **more)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder: Path = write_servable(tmp_path_factory.mktemp("tools") / "tiny")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    # As in real models: some markers are special tokens, which a detokenizer skips, and some are not.
    tokenizer.add_special_tokens(["<tool_call>", "</think>"])
    tokenizer.add_tokens([tokenizers.AddedToken("</tool_call>", special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    subject = ScriptedServer(tokenizer)
    with running(Settings((str(folder),), port=0), subject.make) as server:
        subject.server = server
        subject.http = httpx.Client(base_url=server.url, timeout=30)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=30) as client:
            subject.client = client
            yield subject
        subject.http.close()


def streamed(chunks: Any) -> tuple[str, str, list[dict[str, str]], str | None]:
    """Assembles content, reasoning, calls and finish reason from a stream, as a client does."""
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


def test_a_response_with_reasoning_content_and_a_call(scripted: ScriptedServer) -> None:
    answer = scripted.ask(f"They want it.\n</think>\n\nI look.\n{CALL}", tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.reasoning_content == "They want it."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert call.id.startswith("call_") and json.loads(call.function.arguments) == {"city": "Oslo", "days": 3}
    reasoning_tokens = len(scripted.tokenizer.encode("They want it.\n</think>").ids)
    assert answer.usage.completion_tokens_details.reasoning_tokens == reasoning_tokens
    assert "get_weather" in scripted.prompt() and scripted.prompt().endswith("<think>\n")


def test_content_is_null_if_there_are_only_calls_and_ids_differ(scripted: ScriptedServer) -> None:
    answer = scripted.ask(f"</think>{CALL}\n{CALL}", tools=TOOLS)
    message = answer.choices[0].message
    assert message.content is None and not hasattr(message, "reasoning_content")
    assert len({call.id for call in message.tool_calls}) == 2


def test_a_stream_sends_the_name_first_and_then_the_arguments_in_pieces(scripted: ScriptedServer) -> None:
    # The server sends at most 32 steps in one piece, and each letter is one step here.
    long = "Oslo" * 60
    chunks = list(scripted.ask(f"Hm.</think>I look.{CALL.replace('Oslo', long)}{CALL}", tools=TOOLS, stream=True))
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
def test_the_clients_parse_helpers(scripted: ScriptedServer, stream: bool) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    scripted.output = lambda submit: f"</think>{CALL}"
    if stream:
        with scripted.client.chat.completions.stream(model="tiny", messages=ASK, tools=[tool]) as events:
            kinds = {event.type for event in events}
            answer = events.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
    else:
        answer = scripted.client.chat.completions.parse(model="tiny", messages=ASK, tools=[tool])
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Oslo", days=3)


def test_the_tool_result_is_part_of_the_next_prompt(scripted: ScriptedServer) -> None:
    first = scripted.ask(f"</think>{CALL}", tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    answer = scripted.ask("</think>It rains.", [*ASK, first.to_dict(), result], tools=TOOLS)
    assert answer.choices[0].message.content == "It rains."
    assert "<tool_call>get_weather city=Oslo days=3</tool_call>" in scripted.prompt()
    assert "<|im_start|>tool\nget_weather: rain<|im_end|>" in scripted.prompt()


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Os</tool_call>',
        "<tool_call>no call</tool_call>",
        '<tool_call>{"name": "get_weather"',
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_call_is_content(scripted: ScriptedServer, text: str, stream: bool) -> None:
    answer = scripted.ask(f"</think>{text}", tools=TOOLS, stream=stream)
    if stream:
        content, _, _, reason = streamed(answer)
        assert (content, reason) == (text, "stop")
        return
    message = answer.choices[0].message
    assert (message.content, message.tool_calls, answer.choices[0].finish_reason) == (text, None, "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("cut", "calls"),
    [
        ('"days', [("get_weather", '{"city": "Oslo", ')]),
        ('"city', []),
        ("get_weather", []),
        ("\n{", []),
        ("\n</tool", [("get_weather", '{"city": "Oslo", "days": 3}')]),
    ],
)
def test_a_call_that_max_tokens_cuts_off_leaves_no_markup_in_the_content(
    scripted: ScriptedServer, cut: str, calls: list[tuple[str, str]], stream: bool
) -> None:
    text = f"</think>I look.\n{CALL}"
    count = len(scripted.tokenizer.encode(text[: text.index(cut)]).ids)
    answer = scripted.ask(text, tools=TOOLS, max_tokens=count, stream=stream)
    if stream:
        content, _, found, reason = streamed(answer)
        seen = [(call["name"], call["arguments"]) for call in found]
    else:
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        content = message.content
        seen = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    assert (content, reason, seen) == ("I look.", "length", calls)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_nothing_but_a_call_in_json_is_a_call(scripted: ScriptedServer, stream: bool) -> None:
    """Qwen2.5-Coder answers so."""
    fenced = '```json\n{\n  "name": "get_weather",\n  "arguments": {\n    "city": "Oslo"\n  }\n}\n```'
    for text, tools, expected in (
        (fenced, TOOLS, ("", 1, "tool_calls")),
        (f"Sure:\n{fenced}", TOOLS, (f"Sure:\n{fenced}", 0, "stop")),
        (fenced, openai.omit, (fenced, 0, "stop")),
    ):
        answer = scripted.ask(f"Hm.</think>\n\n{text}", tools=tools, stream=stream)
        if stream:
            content, _, calls, reason = streamed(answer)
        else:
            message, reason = answer.choices[0].message, answer.choices[0].finish_reason
            content, calls = message.content or "", message.tool_calls or []
        assert (content, len(calls), reason) == expected


EDIT = {"type": "function", "function": {"name": "edit", "parameters": {"properties": {"input": {"type": "string"}}}}}


def custom(scripted: ScriptedServer, text: str, grammar: Grammar, **more: Any) -> list[Delta]:
    """Asks for a call of a tool that takes free text. Dialects that have such tools send this."""
    use = ToolUse((EDIT, NOW), input_grammars=(("edit", grammar),), **more)
    scripted.output = lambda submit: text
    request = GenerationRequest(
        "tiny", (ChatPrompt(({"role": "user", "content": "Edit."},)),), tools=use, max_tokens=200
    )

    async def run(server: MillServer) -> list[Delta]:
        return [delta async for batch in await server.mill.services.generation.start(request) for delta in batch]

    found: list[Delta] = scripted.server.call(run)
    return found


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_grammar_of_a_custom_tool_reaches_the_engine(scripted: ScriptedServer, choice: str) -> None:
    call = '<tool_call>\n{"name": "edit", "arguments": {"input": "a\\nb"}}\n</tool_call>'
    deltas = custom(scripted, f"</think>{call}", Grammar("gbnf", 'root ::= "a\\n" [b-c]'), choice=choice)
    assert "".join(call.arguments for delta in deltas for call in delta.calls) == '{"input": "a\\nb"}'
    assert scripted.backend is not None
    grammar = scripted.backend.submits[-1].grammar
    assert grammar is not None
    source = llguidance.LLMatcher.grammar_from_lark(grammar.source)
    for text, good in ((call, True), (call.replace("nb", "nd"), False), ("I would rather talk.", choice == "auto")):
        subject = llguidance.LLMatcher(llguidance.LLTokenizer(scripted.tokenizer.to_str()), source, log_level=0)
        tokens = scripted.tokenizer.encode(f"Hm.</think>{text}").ids
        assert (subject.try_consume_tokens(tokens) == len(tokens) and subject.is_accepting()) == good, text


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("lark", "start: missing"), "missing"),
        (Grammar("regex", "a" * 300_000), "'edit'"),
        (Grammar("lark", 'start: "a"\n%ignore " "'), "%ignore"),
        (Grammar("regex", "(" * 3000 + "a" + ")" * 3000), "'edit'"),
    ],
)
def test_the_grammar_of_a_custom_tool_is_checked_first(scripted: ScriptedServer, grammar: Grammar, reason: str) -> None:
    assert scripted.backend is not None
    before = len(scripted.backend.submits)
    with pytest.raises(BadRequest, match=reason) as error:
        custom(scripted, "</think>x", grammar)
    assert error.value.param == "tools" and len(scripted.backend.submits) == before


def test_only_allowed_tools_are_called(scripted: ScriptedServer) -> None:
    use = {"allowed": frozenset({"edit"})}
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    deltas = custom(scripted, f"</think>{call}", Grammar("regex", "a"), **use)
    assert "".join(delta.text for delta in deltas) == call and not any(delta.calls for delta in deltas)
    assert "now" in scripted.prompt(), "the prompt stays equal from turn to turn"
    with pytest.raises(BadRequest, match="allowed tools"):
        custom(scripted, "", Grammar("regex", "a"), choice="required", name="now", **use)


def test_without_tools_a_call_is_content_and_the_prompt_has_no_tools(scripted: ScriptedServer) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = scripted.ask(f"</think>{CALL}", **more).choices[0].message
        assert (message.content, message.tool_calls) == (CALL, None)
        assert "get_weather" not in scripted.prompt()


def test_without_parallel_calls_the_first_call_ends_the_output(scripted: ScriptedServer) -> None:
    answer = scripted.ask(f"</think>{CALL}{CALL}{CALL}", tools=TOOLS, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    # A step or two may run before the engine receives the cancellation.
    assert answer.usage.completion_tokens < len(scripted.tokenizer.encode(f"</think>{CALL}{CALL}").ids)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_required_call_is_enforced_by_a_grammar(scripted: ScriptedServer, choice: Any) -> None:
    scripted.ask("</think>\n\n" + CALL, tools=TOOLS, tool_choice=choice)
    assert scripted.backend is not None
    grammar = scripted.backend.submits[-1].grammar
    assert grammar is not None and grammar.kind == "lark"
    assert ("get_weather" in grammar.source) == (choice == "required") and "now" in grammar.source
    scripted.ask("</think>Hello.", tools=TOOLS, tool_choice="auto")
    assert scripted.backend.submits[-1].grammar is None


def test_structured_output_beside_tools_is_a_call_or_an_answer_of_that_structure(scripted: ScriptedServer) -> None:
    answer = '{"degrees": 7}'
    schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    called = scripted.ask(CALL, tools=TOOLS, response_format=form).choices[0]
    assert called.finish_reason == "tool_calls" and called.message.tool_calls[0].function.name == "get_weather"
    said = scripted.ask(answer, tools=TOOLS, response_format=form).choices[0]
    assert (said.finish_reason, said.message.content, said.message.tool_calls) == ("stop", answer, None)
    assert scripted.backend is not None
    grammar = scripted.backend.submits[-1].grammar
    assert grammar is not None and "degrees" in grammar.source and "get_weather" in grammar.source


@pytest.mark.parametrize(
    "more",
    [{"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}],
)
def test_reasoning_can_be_turned_off(scripted: ScriptedServer, more: dict[str, Any]) -> None:
    answer = scripted.ask("At once.", **more)
    assert scripted.prompt().endswith("<think></think>\n")
    assert answer.choices[0].message.content == "At once."
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_reasoning_that_never_ends_is_not_content(scripted: ScriptedServer) -> None:
    content, reasoning, _, reason = streamed(scripted.ask("Well, well", stream=True))
    assert (content, reasoning, reason) == ("", "Well, well", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_the_reasoning_is_closed_when_its_budget_is_used_up(scripted: ScriptedServer, stream: bool) -> None:
    """The engine writes the closing into the row: `tests/backend/test_reasoning_limits.py`."""
    closing = scripted.tokenizer.encode("\n</think>\n\n").ids
    asked = {"stream": stream, "extra_body": {"thinking_budget": 20}}
    answer = scripted.ask(("and then " * 50)[:20] + "\n</think>\n\nIt is fine.", **asked)
    reasoning = ("and then " * 50)[:20].rstrip()
    assert scripted.backend is not None
    limit = scripted.backend.submits[-1].reasoning
    assert limit is not None
    assert (limit.tokens, limit.closing, limit.opened, limit.tools) == (20, tuple(closing), True, False)
    assert limit.formats[1] == "think" and scripted.tokenizer.token_to_id("</think>") in limit.shown
    if stream:
        assert streamed(answer) == ("It is fine.", reasoning, [], "stop")
        return
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("It is fine.", reasoning)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 20
    assert answer.usage.completion_tokens == 20 + len(closing) + len("It is fine.") + 1


def test_a_reasoning_budget_of_0_closes_the_reasoning_in_the_prompt(scripted: ScriptedServer) -> None:
    answer = scripted.ask("At once.", extra_body={"thinking_budget": 0})
    assert scripted.prompt().endswith("<think>\n\n</think>\n\n")
    message = answer.choices[0].message
    assert message.content == "At once." and not hasattr(message, "reasoning_content")


def test_a_reasoning_budget_equal_to_max_tokens_ends_the_output(scripted: ScriptedServer) -> None:
    answer = scripted.ask("and then " * 50, max_tokens=20, extra_body={"thinking_budget": 20})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 20


def test_stop_strings_apply_to_content_but_not_to_reasoning_or_calls(scripted: ScriptedServer) -> None:
    answer = scripted.ask(f"Oslo, I think.</think>{CALL}", tools=TOOLS, stop=["Oslo"])
    assert answer.choices[0].message.tool_calls is not None
    answer = scripted.ask("Oslo.</think>It is in Oslo, I think.", stop=["Oslo"])
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("It is in ", "Oslo.")
    assert answer.choices[0].finish_reason == "stop"


def test_every_token_has_its_log_probability(scripted: ScriptedServer) -> None:
    text = f"Hm.</think>I look.{CALL}"
    answer = scripted.ask(text, tools=TOOLS, logprobs=True)
    logprobs = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in logprobs) == text


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
    ({"tools": [NOW, NOW]}, "tools"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"name": "now"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
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
def test_errors_name_the_bad_parameter(scripted: ScriptedServer, body: dict[str, Any], param: str) -> None:
    reply = scripted.http.post("/v1/chat/completions", json={"messages": ASK, **body})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
