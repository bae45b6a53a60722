"""MCP servers as the service connects to them, on an event loop of its own thread."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from millstream.config import ToolServerSpec
from millstream.service.mcp.servers import McpServers
from millstream.service.mcp.tool_server import Pauses
from millstream.service.ports import ToolOutput, ToolServerCard

SERVER = Path(__file__).with_name("mcp_server.py")
PLAIN_SERVER = Path(__file__).with_name("plain_mcp_server.py")
WAIT = 60
QUICK = Pauses(first=0.05, longest=0.2)


def stdio_spec(label: str, **options: Any) -> ToolServerSpec:
    return ToolServerSpec(label, command=sys.executable, args=(str(SERVER),), **options)


def plain_spec(label: str) -> ToolServerSpec:
    """A server of an older version that starts at once."""
    return ToolServerSpec(label, command=sys.executable, args=("-I", str(PLAIN_SERVER)))


def shell_spec(label: str, script: str, **options: Any) -> ToolServerSpec:
    """A process that is no MCP server."""
    return ToolServerSpec(label, command="sh", args=("-c", script), **options)


class Connected:
    """The servers, for a test that is not async."""

    def __init__(self, loop: asyncio.AbstractEventLoop, servers: McpServers) -> None:
        self._loop = loop
        self.servers = servers

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, WAIT), self._loop).result(WAIT)

    def call(self, label: str, name: str, **arguments: Any) -> ToolOutput:
        output = self.run(self.servers.call(label, name, arguments))
        assert isinstance(output, ToolOutput)
        return output

    def card(self, label: str) -> ToolServerCard:
        return next(card for card in self.servers.cards() if card.label == label)

    def wait_for(self, label: str, state: str) -> None:
        deadline = time.monotonic() + WAIT
        while self.card(label).state != state:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextmanager
def connected(specs: Sequence[ToolServerSpec], pauses: Pauses = QUICK) -> Iterator[Connected]:
    """Starts the servers on uvloop, as `millstream serve` does, and closes them."""
    loop = uvloop.new_event_loop()
    faults: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: faults.append(context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def make() -> McpServers:
        return McpServers(specs, pauses)

    subject = Connected(loop, asyncio.run_coroutine_threadsafe(make(), loop).result(WAIT))
    loop.call_soon_threadsafe(subject.servers.start)
    try:
        yield subject
    finally:
        subject.run(subject.servers.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT)
        loop.close()
    assert not faults


@contextmanager
def http_server(app: Any, port: int = 0) -> Iterator[int]:
    """Serves an ASGI app on a local port."""
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(WAIT)
        listener.close()
