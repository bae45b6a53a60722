"""What Anthropic's messages become: the request that the service gets. Scripted service, real HTTP."""

from __future__ import annotations

import json
import logging

import pytest

from millstream.types import ChatPrompt, Grammar, MediaPart, Sampling, Thinking
from support.services import services

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
BODY = {"model": "m", "max_tokens": 16, "messages": HI}
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "ä"}}
CALLED = {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "ä"}'}}
SEAL = services(None).seal


def text(value: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": value, **more}


@pytest.fixture
def sent(http, service):
    """Sends a body, and returns the request that the service got."""

    def send(**more: object):
        response = http.post(PATH, json=BODY | more)
        assert response.status_code == 200, response.text
        return service.requests[-1]

    return send


@pytest.fixture
def messages(sent):
    """The messages that the service got for these."""

    def send(*items: object, **more: object):
        prompt = sent(messages=list(items), **more).prompts[0]
        assert isinstance(prompt, ChatPrompt)
        return list(prompt.messages)

    return send


def result(*items: object, **more: object) -> dict[str, object]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", **more}, *items]}


def test_a_request(sent):
    request = sent(temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["END", "\n\n"])
    assert (request.model, request.max_tokens, request.n) == ("m", 16, 1)
    assert request.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=3)
    assert request.stop == ("END", "\n\n") and request.unset >= {"seed", "min_p"}
    assert not request.unset & {"temperature", "top_p", "top_k"}
    assert request.prompts == (ChatPrompt(({"role": "user", "content": "hi"},)),)
    assert request.thinking == Thinking() and request.tools is None and request.grammar is None
    assert sent().sampling.temperature == 1.0 and "temperature" in sent().unset
    assert sent(top_p=0).sampling.top_p == 0


BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cch=1234;"


@pytest.mark.parametrize(
    "system, seen",
    [
        ("Be brief.", "Be brief."),
        ([text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")], "Be brief.\n\nBe kind."),
        ([text(BILLING), text("Be brief.")], "Be brief."),
        (f"{BILLING}\nBe brief.", "Be brief."),
        ([text(BILLING)], None),
        ("", None),
        ([], None),
    ],
)
def test_system_prompts(messages, system, seen):
    found = messages(*HI, system=system)
    assert found == ([{"role": "system", "content": seen}] if seen else []) + HI


def test_system_messages_stay_where_they_are(messages):
    note = {"role": "system", "content": [text("The user is away."), text(BILLING)]}
    answer = {"role": "assistant", "content": "yes"}
    assert messages(*HI, answer, note, *HI) == [*HI, answer, {"role": "system", "content": "The user is away."}, *HI]


DOCUMENT = {"type": "document", "title": "A", "context": "old", "citations": {"enabled": True}}


@pytest.mark.parametrize(
    "blocks, seen",
    [
        ([text("a", citations=None), text("b", cache_control={"type": "ephemeral"}, unheard_of=1)], "ab"),
        ([], ""),
        (
            [DOCUMENT | {"source": {"type": "text", "media_type": "text/plain", "data": "once"}}, text("Why?")],
            '<document title="A" context="old">\nonce\n</document>\nWhy?',
        ),
        (
            [{"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}],
            "<document>\na\nb\n</document>\n",
        ),
        ([{"type": "document", "source": {"type": "content", "content": "c"}}], "<document>\nc\n</document>\n"),
        (
            [{"type": "search_result", "source": "u", "title": "T", "content": [text("found")]}],
            '<search_result source="u" title="T">\nfound\n</search_result>\n',
        ),
        ([{"type": "tool_reference", "tool_name": "look"}], "look"),
        ([{"type": "compaction", "content": "so far"}], "so far"),
    ],
)
def test_blocks_that_become_text(messages, blocks, seen):
    assert messages({"role": "user", "content": blocks}) == [{"role": "user", "content": seen}]


@pytest.mark.parametrize(
    "source, url",
    [
        (PIXEL["source"], "data:image/png;base64,AAAA"),
        ({"type": "url", "url": "https://x.example/a.png"}, "https://x.example/a.png"),
    ],
)
def test_images(messages, source, url):
    blocks = [text("What?"), {"type": "image", "source": source, "cache_control": None}]
    (message,) = messages({"role": "user", "content": blocks})
    media = MediaPart("image", url, "messages[0].content[1]")
    assert message["content"] == [{"type": "text", "text": "What?"}, {"type": "image", "media": media}]


def test_calls_and_results(messages):
    answer = {"role": "assistant", "content": [text("Let me see."), CALL]}
    found = messages(*HI, answer, result(text("Go on."), content="a lake"))
    assert found[1:] == [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "a lake"},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize(
    "more, seen",
    [
        ({}, ""),
        ({"content": []}, ""),
        ({"content": [text("a"), text("b")]}, "a\nb"),
        ({"content": "none", "is_error": True}, "The call failed: none"),
        ({"content": "fine", "is_error": False}, "fine"),
        ({"content": [{"type": "tool_reference", "tool_name": n} for n in ("x", "y")]}, "x\ny"),
        (
            {"content": [{"type": "document", "source": {"type": "text", "data": "once"}}]},
            "<document>\nonce\n</document>\n",
        ),
    ],
)
def test_results(messages, more, seen):
    answer = {"role": "assistant", "content": [CALL]}
    assert messages(*HI, answer, result(**more))[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": seen},
    ]


def test_results_come_before_the_rest_of_their_message(messages):
    other = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "two"}
    both = {"role": "user", "content": [text("see: "), *result(content="one")["content"], other, text("go")]}
    found = messages(*HI, {"role": "assistant", "content": [CALL, CALL | {"id": "toolu_2"}]}, both)
    assert [(m["role"], m["content"]) for m in found[2:]] == [("tool", "one"), ("tool", "two"), ("user", "see: go")]


def test_images_of_results_follow_in_a_user_message(messages):
    answer = {"role": "assistant", "content": [CALL]}
    found = messages(*HI, answer, result(text("Well?"), content=[PIXEL]))
    media = MediaPart("image", "data:image/png;base64,AAAA", "messages[2].content[0].content[0]")
    assert found[2:] == [
        {"role": "tool", "tool_call_id": "toolu_1", "content": "The result is an image. It follows."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Result of the call toolu_1:\n"},
                {"type": "image", "media": media},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    assert messages(*HI, answer, result(content=[text("seen"), PIXEL]))[2]["content"] == "seen"


@pytest.mark.parametrize(
    "block, seen",
    [
        ({"type": "thinking", "thinking": "hm", "signature": SEAL.seal("hm")}, "hm"),
        ({"type": "thinking", "thinking": "", "signature": SEAL.seal("hm")}, "hm"),
        ({"type": "thinking", "thinking": "from another server", "signature": "abc"}, "from another server"),
        ({"type": "thinking", "thinking": "", "signature": "ä"}, None),
        ({"type": "thinking"}, None),
        ({"type": "redacted_thinking", "data": SEAL.seal("hm")}, "hm"),
        ({"type": "redacted_thinking", "data": "abc"}, None),
    ],
)
def test_reasoning_goes_back_to_the_model(messages, block, seen):
    found = messages(*HI, {"role": "assistant", "content": [block, text("yes")]}, *HI)
    assert found[1] == {"role": "assistant", "content": "yes"} | ({"reasoning_content": seen} if seen else {})


def test_blocks_of_hosted_tools_in_a_conversation_are_text(messages):
    searched = [{"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "xyz"}]
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "ä"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": searched},
        {"type": "mcp_tool_use", "id": "t", "name": "n", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "t", "content": [text("out")]},
    ]
    (_, answer, _) = messages(*HI, {"role": "assistant", "content": blocks}, *HI)
    assert answer["content"] == (
        '<server_tool_use name="web_search">\n{"query": "ä"}\n</server_tool_use>\n'
        '<web_search_tool_result>\n[{"type": "web_search_result", "title": "T", "url": "u"}]\n'
        "</web_search_tool_result>\n"
        '<mcp_tool_use name="n">\n{}\n</mcp_tool_use>\n'
        '<mcp_tool_result>\n[{"type": "text", "text": "out"}]\n</mcp_tool_result>\n'
    )


@pytest.mark.parametrize(
    "more, expected",
    [
        ({}, Thinking()),
        ({"thinking": {"type": "disabled"}}, Thinking("none")),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, Thinking("none")),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, Thinking("medium", 1024)),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9, "display": None}, "output_config": {"effort": "max"}},
            Thinking("max", 9),
        ),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, Thinking()),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, Thinking("low")),
        ({"thinking": {"type": "between_tools"}}, Thinking()),
        ({"output_config": {"effort": "xhigh"}}, Thinking("xhigh")),
        ({"output_config": {"effort": None, "format": None, "task_budget": {"total": 9}}}, Thinking()),
    ],
)
def test_thinking(sent, more, expected):
    assert sent(**more).thinking == expected


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize("more", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}])
def test_structured_output(sent, more):
    grammar = sent(**more).grammar
    assert isinstance(grammar, Grammar) and grammar.kind == "json_schema" and json.loads(grammar.source) == SCHEMA


CLAUDE_CODE = {
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "mcp_servers": [],
    "container": None,
    "betas": ["claude-code-20250219"],
    "cache_control": {"type": "ephemeral"},
    "speed": "standard",
    "diagnostics": None,
    "inference_geo": "eu",
    "stream": False,
}


def test_fields_that_cannot_change_the_answer(sent):
    assert sent(**CLAUDE_CODE) == sent()


def test_fields_that_are_not_known_yet_are_ignored_and_misspelled_ones_refused(http, service, caplog):
    with caplog.at_level(logging.DEBUG, logger="millstream.api.params"):
        for options in ({}, {"params": {"beta": "true"}}, {"headers": {"anthropic-beta": "quantum-2027-01-01"}}):
            assert http.post(PATH, json=BODY | {"quantum_mode": "on"}, **options).status_code == 200
            misspelled = http.post(PATH, json=BODY | {"temprature": 0.5}, **options)
            assert misspelled.status_code == 400 and "temperature" in misspelled.json()["error"]["message"]
    assert "quantum_mode" in caplog.text and len(service.requests) == 3


def test_a_begun_answer_is_continued(sent):
    begun = sent(messages=[*HI, {"role": "assistant", "content": "The answer is ("}]).prompts[0]
    assert begun.continue_final and begun.messages[-1]["content"] == "The answer is ("
    assert not sent().prompts[0].continue_final


def test_counting_takes_the_same_conversation(http, service):
    body = {"model": "m", "system": "s", "messages": [*HI, {"role": "assistant", "content": "yes"}]}
    for path in ("/v1/messages/count_tokens", "/v1/messages/count_tokens?beta=true"):
        response = http.post(path, json=body | {"thinking": {"type": "disabled"}})
        assert response.json() == {"input_tokens": 42}
        request = service.requests[-1]
        assert [m["role"] for m in request.prompts[0].messages] == ["system", "user", "assistant"]
        assert request.thinking == Thinking("none")


def test_a_conversation_is_the_same_in_openais_dialect(http, service):
    schema = {"type": "object", "properties": {"at": {"type": "string"}}}
    tool = {"name": "look", "description": "Look", "input_schema": schema}
    thought = {"type": "thinking", "thinking": "hm", "signature": SEAL.seal("hm")}
    turns = [
        *HI,
        {"role": "assistant", "content": [thought, text("Let me see."), CALL]},
        result(content=[text("a lake")]),
        {"role": "assistant", "content": [CALL | {"id": "toolu_2"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_2", "content": "fog"}, text("So?")]},
    ]
    assert http.post(PATH, json=BODY | {"system": "Be brief.", "messages": turns, "tools": [tool]}).status_code == 200
    chat = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            *HI,
            {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "a lake"},
            {"role": "assistant", "content": None, "tool_calls": [CALLED | {"id": "toolu_2"}]},
            {"role": "tool", "tool_call_id": "toolu_2", "content": "fog"},
            {"role": "user", "content": "So?"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "look", "description": "Look", "parameters": schema}},
        ],
    }
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    first, second = service.requests
    assert first.prompts == second.prompts and first.tools == second.tools and first.thinking == second.thinking


def test_a_whole_float_is_an_integer(sent):
    assert sent(max_tokens=16.0).max_tokens == 16
