"""Read the tables [mcp.servers.NAME] of the config file: MCP servers whose tools requests may use.

[mcp.servers.files]
command = "npx"
args = ["-y", "@modelcontextprotocol/server-filesystem", "/data"]

[mcp.servers.search]
url = "https://search.example/mcp"
headers = { Authorization = "Bearer ..." }
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from millstream.cli import toml_tables as toml
from millstream.cli.toml_tables import Reader, joined, read_table
from millstream.config import TOOL_SERVER_TRANSPORTS, ToolServerSpec
from millstream.errors import ModelError

_LABEL = re.compile(r"[A-Za-z0-9_-]{1,64}")
_VARIABLE = re.compile(r"[^=\0]+")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")
_MAX_TIMEOUT = 24 * 3600.0
_WITH_COMMAND = ("args", "env", "cwd")
_WITH_URL = ("headers", "transport")


def _variables(value: object) -> tuple[tuple[str, str], ...]:
    variables = toml.string_table(value)
    for name, text in variables:
        if not _VARIABLE.fullmatch(name) or "\0" in text:
            raise ArgumentTypeError(f"the name or value of {name!r} cannot be that of an environment variable")
    return variables


def _headers(value: object) -> tuple[tuple[str, str], ...]:
    headers = toml.string_table(value)
    for name, text in headers:
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(text):
            raise ArgumentTypeError(f"the name or value of {name!r} cannot be that of an HTTP header")
    return headers


def _url(value: object) -> str:
    """Errors do not repeat the URL: it may hold a password."""
    text = toml.string(value)
    try:
        parts = urlsplit(text)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        complete = False
    if not complete or not text.isprintable() or " " in text:
        raise ArgumentTypeError("is not a URL: use http://localhost:9000/mcp or https://example.com/mcp")
    return text


def _timeout(value: object) -> float:
    seconds = toml.time_span(value)
    if not 0 < seconds <= _MAX_TIMEOUT:
        raise ArgumentTypeError(f"{value!r} is not a time limit: use 90s, 10m or a number of seconds, above 0, to 24h")
    return seconds


SERVER: dict[str, Reader] = {
    "command": toml.string,
    "args": toml.strings,
    "env": _variables,
    "cwd": toml.string,
    "url": _url,
    "headers": _headers,
    "transport": toml.choice(*TOOL_SERVER_TRANSPORTS),
    "timeout": _timeout,
    "start_timeout": _timeout,
    "tools": toml.string_or_strings,
}


def read_tool_servers(table: object, file: Path, folder: Path) -> tuple[ToolServerSpec, ...]:
    """`table` is the table [mcp]. Paths are relative to `folder`. Raises `ModelError`."""
    servers = read_table(table, {"servers": lambda value: value}, file=file, name="mcp").get("servers", {})
    if not isinstance(servers, dict):
        raise ModelError(f"{file}: mcp.servers must be tables, one per server: [mcp.servers.NAME]")
    return tuple(_server(label, options, file, folder) for label, options in servers.items())


def _server(label: str, table: object, file: Path, folder: Path) -> ToolServerSpec:
    where = joined("mcp.servers", label)
    if not _LABEL.fullmatch(label):
        raise ModelError(f"{file}: [{where}]: a name has 1 to 64 letters, digits, dashes and underscores")
    values = read_table(table, SERVER, file=file, name=where)
    _check_kind(values, f"{file}: [{where}]")
    if "cwd" in values:
        values["cwd"] = folder / Path(values["cwd"]).expanduser()
    if values.get("command", "").startswith(("./", "../")):
        values["command"] = str(folder / values["command"])
    return ToolServerSpec(label=label, **values)


def _check_kind(values: dict[str, Any], where: str) -> None:
    if ("command" in values) == ("url" in values):
        problem = "has both a command and a url" if "command" in values else "needs a command or a url"
        raise ModelError(f"{where} {problem}: set command to start a server, or url to connect to one that runs")
    kind, foreign = ("command", _WITH_URL) if "command" in values else ("url", _WITH_COMMAND)
    for option in foreign:
        if option in values:
            raise ModelError(f"{where} has a {kind}, so {option} has no effect: remove it")
