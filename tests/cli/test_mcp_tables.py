"""[mcp.servers.NAME] in the config file, and the options of the store."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.cli import serve
from millstream.cli.config_file import ConfigFile, read_config
from millstream.cli.settings import settings_of
from millstream.config import Settings, ToolServerSpec
from millstream.errors import ModelError

Reads = Callable[[str], ConfigFile]


@pytest.fixture
def read(tmp_path: Path) -> Reads:
    def read(text: str) -> ConfigFile:
        file = tmp_path / "mill.toml"
        file.write_text(text, encoding="utf-8")
        return read_config(file)

    return read


def settings(*words: str) -> Settings:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return settings_of(parser.parse_args(["serve", *words]), {})


def test_both_kinds_of_servers(read: Reads, tmp_path: Path) -> None:
    config = read(
        """
        [mcp.servers.files]
        command = "./bin/files"
        args = ["--root", "/data"]
        env = { TOKEN = "abc" }
        cwd = "work"
        timeout = "2m"
        start_timeout = 5
        tools = ["read", "list"]

        [mcp.servers.search]
        url = "https://search.example/mcp"
        headers = { Authorization = "Bearer abc" }
        transport = "sse"

        [mcp.servers.plain]
        command = "npx"
        """
    )
    assert config.tool_servers == (
        ToolServerSpec(
            "files",
            command=str(tmp_path / "bin/files"),
            args=("--root", "/data"),
            env=(("TOKEN", "abc"),),
            cwd=tmp_path / "work",
            timeout=120.0,
            start_timeout=5.0,
            tools=("read", "list"),
        ),
        ToolServerSpec(
            "search", url="https://search.example/mcp", headers=(("Authorization", "Bearer abc"),), transport="sse"
        ),
        ToolServerSpec("plain", command="npx", timeout=60.0, start_timeout=30.0),
    )
    assert "abc" not in repr(config.tool_servers)


def test_they_reach_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "mill.toml"
    file.write_text('[server]\nstore_dir = "kept"\nstore_age = "2h"\n[mcp.servers.a]\ncommand = "x"')
    found = settings("--config", str(file), "--store-size", "1MiB")
    assert found.tool_servers == (ToolServerSpec("a", command="x"),)
    assert (found.store_dir, found.store_size, found.record_seconds) == (tmp_path / "kept", 2**20, 7200.0)
    assert settings().tool_servers == ()


def test_how_long_responses_are_stored() -> None:
    assert settings().record_seconds == 24 * 3600
    assert settings("--store-dir", "kept").record_seconds == 30 * 24 * 3600
    assert settings("--store-dir", "kept", "--store-age", "90s").record_seconds == 90
    assert settings("--store-age", "0").record_seconds == float("inf")


A = "[mcp.servers.a]\n"


@pytest.mark.parametrize(
    "text, words",
    [
        ("mcp = 1", ["mcp must be a table"]),
        ("[mcp.files]\ncommand = 'x'", ["[mcp] has no table 'files'", "[mcp.servers.NAME]"]),
        ("[mcp]\nservers = ['x']", ["mcp.servers must be tables", "[mcp.servers.NAME]"]),
        ("[mcp.servers]\na = 'x'", ["mcp.servers.a must be a table"]),
        ("[mcp.servers.'a b']\ncommand = 'x'", ['[mcp.servers."a b"]', "letters, digits"]),
        (A, ["[mcp.servers.a] needs a command or a url"]),
        (A + "command = 'x'\nurl = 'http://h/'", ["[mcp.servers.a] has both a command and a url"]),
        (A + "comand = 'x'", ["[mcp.servers.a] has no option 'comand'", "did you mean 'command'?"]),
        (A + "command = ['x']", ["mcp.servers.a.command: ['x'] is not a string"]),
        (A + "command = 'x'\nargs = 'y'", ["mcp.servers.a.args: must be a list of strings"]),
        (A + "command = 'x'\nheaders = { b = 'c' }", ["[mcp.servers.a] has a command, so headers has no effect"]),
        (A + "url = 'http://h/'\nenv = { b = 'c' }", ["[mcp.servers.a] has a url, so env has no effect"]),
        (A + "url = 'localhost:9000'", ["mcp.servers.a.url: is not a URL", "http://localhost:9000/mcp"]),
        (A + "url = 'ftp://h/'", ["mcp.servers.a.url: is not a URL"]),
        (A + "url = 'http://h:x/'", ["mcp.servers.a.url: is not a URL"]),
        (A + "url = 'http://h/'\ntransport = 'ws'", ["mcp.servers.a.transport: 'ws' is not one of streamable-http"]),
        (A + "url = 'http://h/'\nheaders = { 'a b' = 'c' }", ["mcp.servers.a.headers", "HTTP header"]),
        (A + "command = 'x'\ntimeout = 0", ["mcp.servers.a.timeout: 0 is not a time limit"]),
        (A + "command = 'x'\ntimeout = 'soon'", ["mcp.servers.a.timeout: 'soon' is not a duration"]),
        (A + "command = 'x'\ntools = [1]", ["mcp.servers.a.tools: 1 is not a string"]),
    ],
)
def test_errors_name_the_file_and_the_key(read: Reads, tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        read(text)
    for part in (str(tmp_path / "mill.toml"), *words):
        assert part in caught.value.message


@pytest.mark.parametrize(
    "option",
    ["env = { A = 'hush', B = 1 }", "env = 'hush'", "env = { 'A=' = 'hush' }", 'headers = { A = "hush\\n" }'],
)
def test_secrets_stand_in_no_error(read: Reads, option: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(A + "command = 'x'\n" + option)
    assert "mcp.servers.a" in caught.value.message and "hush" not in caught.value.message
