"""MCP servers that cannot be started, do not answer, or do not want to end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from millstream.config import ToolServerSpec
from millstream.errors import ModelError, ToolServerFailed
from millstream.service.mcp import process
from millstream.service.mcp.servers import McpServers
from millstream.service.mcp.tool_server import Pauses
from support.mcp_clients import PLAIN_SERVER, connected, plain_spec, shell_spec


@pytest.mark.parametrize(
    "spec, reason",
    [
        (ToolServerSpec("bad", command="no-such-program"), "cannot run 'no-such-program': No such file or directory"),
        (ToolServerSpec("bad", command="sh", cwd=Path("/no/such")), "cannot run 'sh' in /no/such: No such file"),
        (shell_spec("bad", "echo hush >&2; exit 3"), "it ended before it was ready"),
        (shell_spec("bad", "echo this is no JSON; exit 3"), "it ended before it was ready"),
        (shell_spec("bad", "cat > /dev/null", start_timeout=0.3), "it was not ready within 0.3 seconds"),
        (ToolServerSpec("bad", url="http://127.0.0.1:9/mcp"), "connection attempts failed"),
        (ToolServerSpec("bad", url="http://127.0.0.1:9/sse", transport="sse"), "connection attempts failed"),
    ],
)
def test_a_server_that_cannot_be_started(spec: ToolServerSpec, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with connected([spec]) as subject:
        with pytest.raises(ToolServerFailed) as caught:
            subject.run(subject.servers.tools("bad"))
        assert "MCP server 'bad' is not available: " in caught.value.message
        assert reason in caught.value.message
        output = subject.call("bad", "echo", text="x")
        assert output.is_error and reason in output.text
        card = subject.card("bad")
    assert card.state == "failed" and card.error is not None and reason in card.error
    assert f"MCP server bad: {card.error}; starting it again" in caplog.text


def test_what_a_process_wrote_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with connected([shell_spec("bad", "echo hush >&2; exit 3")]) as subject:
        subject.wait_for("bad", "failed")
        assert "hush" not in (subject.card("bad").error or "")
    assert "It wrote: hush" in caplog.text


def test_it_is_started_again_with_growing_pauses_and_then_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts = tmp_path / "starts"
    script = f"echo x >> {starts}; [ $(wc -l < {starts}) -lt 4 ] && exit 1; exec {sys.executable} -I {PLAIN_SERVER}"
    with connected([shell_spec("late", script)], Pauses(first=0.1, longest=0.2)) as subject:
        began = time.monotonic()
        subject.wait_for("late", "ready")
        assert time.monotonic() - began > 0.1 + 0.2 + 0.2
        assert subject.call("late", "echo", text="x").text == "x"
        assert subject.card("late").error is None
    assert starts.read_text() == "x\n" * 4
    assert caplog.text.count("it ended before it was ready") == 1, "the same error again is no news"


def test_callers_wait_for_one_new_attempt_and_no_more() -> None:
    with connected([plain_spec("ill")], Pauses(first=1.0)) as subject:
        assert subject.call("ill", "die").is_error
        assert subject.call("ill", "echo", text="again").text == "again"
        assert subject.call("ill", "die").is_error
        output = subject.call("ill", "echo", text="again")
        assert (output.text, output.is_error) == ("The MCP server 'ill' is not available: it has ended.", True)


def test_a_message_that_is_too_long_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a limit, a server could fill the memory; and 50 MB took the mcp package's own transport 98 s of the event
    loop."""
    monkeypatch.setattr(process, "MAX_MESSAGE_BYTES", 100_000)
    with connected([plain_spec("loud")]) as subject:
        assert subject.call("loud", "big", size=1000).text == "x" * 1000
        assert subject.call("loud", "big", size=100_000).is_error
        assert subject.call("loud", "echo", text="again").text == "again"
    assert "MCP server loud: it sent a message of more than 100000 bytes; starting it again" in caplog.text


def test_lines_that_are_no_messages_are_ignored() -> None:
    script = f"echo Welcome; echo; echo '{{}}'; exec {sys.executable} -I {PLAIN_SERVER}"
    with connected([shell_spec("chatty", script)]) as subject:
        assert subject.call("chatty", "echo", text="x").text == "x"


STUBBORN = "trap '' TERM; while :; do sleep 100; done # stubborn-mcp-server"


def test_a_process_that_ignores_its_end_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EXIT_SECONDS", 0.2)
    with connected([shell_spec("bad", STUBBORN)]) as subject:
        family = stubborn_family()
        assert subject.card("bad").state == "starting"
        began = time.monotonic()
    assert time.monotonic() - began < 40
    assert_gone(family)


def test_a_second_signal_kills_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EXIT_SECONDS", 0.2)
    with connected([shell_spec("bad", STUBBORN)], Pauses(first=60)) as subject:
        family = stubborn_family()
        subject.servers.kill()
        assert_gone(family)


def stubborn_family() -> list[psutil.Process]:
    """The shell and what it started."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process().children():
            words = child.cmdline() if child.status() != psutil.STATUS_ZOMBIE else ()
            if any("stubborn-mcp-server" in word for word in words) and child.children():
                return [child, *child.children(recursive=True)]
        time.sleep(0.02)
    raise AssertionError("it was not started")


def assert_gone(family: list[psutil.Process]) -> None:
    """Not psutil's wait: it would take the exit status from the event loop."""
    deadline = time.monotonic() + 60
    while any(is_alive(member) for member in family):
        assert time.monotonic() < deadline


def is_alive(member: psutil.Process) -> bool:
    try:
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_without_the_extra_the_server_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "millstream.service.mcp.tool_server")
    with pytest.raises(ModelError, match=r"\[mcp.servers.a\] needs the mcp package.*pip install 'millstream\[mcp\]'"):
        McpServers([ToolServerSpec("a", command="x")])
    assert McpServers(()).labels == ()
