"""MCP servers that are processes: real ones, two side by side, that answer, take too long, and die."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import psutil
import pytest

from millstream.api import functions
from millstream.errors import BadRequest
from millstream.service.mcp import listing, tool_server
from millstream.service.mcp.results import MAX_OUTPUT_CHARS
from support.mcp_clients import Connected, connected, stdio_spec

OFFERED = ("echo", "sleep", "pid", "missing")


@pytest.fixture(scope="module")
def mill() -> Iterator[Connected]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "hush")
        patch.setenv("LANG", "C.UTF-8")
        one = stdio_spec("one", env=(("OWN", "yes"),), timeout=30.0)
        with connected([one, stdio_spec("two", timeout=2.0, tools=OFFERED)]) as subject:
            for label in subject.servers.labels:
                subject.run(subject.servers.tools(label))
            yield subject


def test_tools_are_listed_with_their_schemas(mill: Connected) -> None:
    tools = {tool.name: tool for tool in mill.run(mill.servers.tools("one"))}
    assert tools["add"].description == "Adds two numbers."
    assert tools["add"].parameters["required"] == ["a", "b"]
    assert tools["add"].parameters["properties"]["a"]["type"] == "integer"
    assert tools["fail"].description == ""
    assert "a bad name" not in tools
    assert mill.card("one").tools == tuple(tools.values())
    assert [tool.name for tool in mill.run(mill.servers.tools("two"))] == ["echo", "sleep", "pid"]


def test_names_are_those_that_requests_may_use() -> None:
    assert (listing.NAME_PATTERN, listing.MAX_TOOLS) == (functions.NAME_PATTERN, functions.MAX_TOOLS)


@pytest.mark.parametrize(
    "name, arguments, text",
    [
        ("echo", {"text": "grüße"}, "grüße"),
        ("add", {"a": 1, "b": 2}, "3"),
        ("picture", {}, "[image: image/png, 5 bytes, not shown]"),
        ("mixed", {}, "first\na note\n[resource: page, https://example.com/page (text/html)]"),
        ("structured", {}, '{"größe": [1, 2]}'),
    ],
)
def test_calls(mill: Connected, name: str, arguments: dict[str, object], text: str) -> None:
    output = mill.call("one", name, **arguments)
    assert (output.text, output.is_error) == (text, False)


def test_a_long_output_is_cut(mill: Connected) -> None:
    whole, cut = mill.call("one", "big", size=MAX_OUTPUT_CHARS), mill.call("one", "big", size=10**6)
    assert whole.text == "x" * MAX_OUTPUT_CHARS
    assert cut.text.startswith(whole.text + "\n[Cut here: the output has 1000000 characters")


def test_failures_are_outputs_for_the_model(mill: Connected) -> None:
    for name, arguments, words in [
        ("fail", {}, "fail"),
        ("add", {"a": "x", "b": 1}, "integer"),
        ("none", {}, "'one' has no tool 'none'"),
        ("a bad name", {}, "'one' has no tool 'a bad name'"),
    ]:
        output = mill.call("one", name, **arguments)
        assert output.is_error and words in output.text
    assert mill.call("two", "add", a=1, b=2).is_error  # not in its list of tools
    assert mill.card("one").state == "ready"


def test_a_list_that_is_not_fresh_is_read_again(mill: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    mill.call("one", "grow")
    assert "grown" not in [tool.name for tool in mill.run(mill.servers.tools("one"))]
    monkeypatch.setattr(tool_server, "TOOLS_FRESH_SECONDS", 0.0)
    deadline = time.monotonic() + 60
    while "grown" not in [tool.name for tool in mill.run(mill.servers.tools("one"))]:
        assert time.monotonic() < deadline
    assert mill.call("one", "grown").text == "new"


def test_an_unknown_server_is_a_bad_request(mill: Connected) -> None:
    with pytest.raises(BadRequest, match="no MCP server 'three': configured are one, two"):
        mill.run(mill.servers.tools("three"))
    with pytest.raises(BadRequest, match="no MCP server 'three'"):
        mill.call("three", "echo", text="x")


def test_a_process_gets_no_secrets(mill: Connected) -> None:
    variables = json.loads(mill.call("one", "variables").text)
    assert (variables["OWN"], variables["LANG"]) == ("yes", "C.UTF-8")
    assert "OPENAI_API_KEY" not in variables and "PYTHONPATH" not in variables


def test_calls_have_a_time_limit(mill: Connected) -> None:
    began = time.monotonic()
    output = mill.call("two", "sleep", seconds=60)
    assert time.monotonic() - began < 40
    assert output.is_error and "time limit of 2 seconds" in output.text
    assert mill.call("two", "echo", text="still there").text == "still there"


def test_calls_run_side_by_side(mill: Connected) -> None:
    async def all_at_once() -> list[str]:
        calls = [mill.servers.call("one", "sleep", {"seconds": 2.0}) for _ in range(20)]
        return [output.text for output in await asyncio.gather(*calls)]

    began = time.monotonic()
    assert mill.run(all_at_once()) == ["slept"] * 20
    assert time.monotonic() - began < 30


def test_a_cancelled_call_costs_nothing_else(mill: Connected) -> None:
    async def cancel_one() -> None:
        task = asyncio.create_task(mill.servers.call("one", "sleep", {"seconds": 30}))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    mill.run(cancel_one())
    assert mill.call("one", "echo", text="still there").text == "still there"


def test_a_server_that_dies_fails_its_own_calls_and_starts_again(
    mill: Connected, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = mill.call("one", "pid").text, mill.call("two", "pid").text

    async def die_amid_calls() -> tuple[list[bool], str, str]:
        running = asyncio.create_task(mill.servers.call("one", "sleep", {"seconds": 30}))
        await asyncio.sleep(0.05)
        died = await mill.servers.call("one", "die", {})
        beside = await mill.servers.call("two", "pid", {})
        return [died.is_error, (await running).is_error], beside.text, mill.card("one").state

    began = time.monotonic()
    assert mill.run(die_amid_calls()) == ([True, True], other, "starting")
    second = mill.call("one", "pid")  # waits until it is ready again
    assert time.monotonic() - began < 50
    assert not second.is_error and second.text != first
    assert mill.card("one").error is None
    assert "MCP server one: it has ended; starting it again" in caplog.text
    assert "dying of a cause" in caplog.text


def test_closing_ends_the_processes(mill: Connected) -> None:
    """Last: it closes what the other tests use."""
    pids = [int(mill.call(label, "pid").text) for label in ("one", "two")]

    async def close_amid_a_call() -> bool:
        running = asyncio.create_task(mill.servers.call("one", "sleep", {"seconds": 30}))
        await asyncio.sleep(0.05)
        await mill.servers.close()
        return (await running).is_error

    assert mill.run(close_amid_a_call())
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert mill.call("one", "echo", text="x").is_error
    assert mill.card("one").state == "failed"
