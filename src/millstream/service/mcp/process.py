"""An MCP server as a child process: one JSON message per line on its stdin and stdout.

The mcp package has such a transport. This one differs in what a server can cost the others: a message has a size limit
and is read in linear time, so that a huge one does not hold up the event loop. It also keeps what the process wrote to
stderr, and ends the whole process group.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter
from pydantic import ValidationError

from millstream.config import ToolServerSpec
from millstream.sandbox import signal_group

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 8 * 2**20
"""Of a message from a server. A longer one ends the connection. A screenshot fits."""

EXIT_SECONDS = 2.0
"""For a process to end by itself once its stdin is closed, and again after SIGTERM."""
_READ_BYTES = 64 * 1024
_TAIL_BYTES = 1000
_HARMLESS = ("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
"""Passed on to processes, besides those of the mcp package: HOME, LOGNAME, PATH, SHELL, TERM and USER."""


class ProcessFailed(Exception):
    """The process could not be started, or broke the rules of the transport."""


def environment(spec: ToolServerSpec, own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of the process. No others of this process are passed on: API keys and hub tokens stay here."""
    return get_default_environment() | {name: own[name] for name in _HARMLESS if name in own} | dict(spec.env)


class ErrorOutput:
    """What a process writes to stderr. It goes to the debug log; the end of it is kept for when the process fails."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._tail = b""
        self._line = b""

    @property
    def tail(self) -> str:
        return self._tail.decode(errors="replace").strip()

    async def read(self, stderr: asyncio.StreamReader) -> None:
        while data := await stderr.read(_READ_BYTES):
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            *lines, rest = (self._line + data).split(b"\n")
            self._line = rest[-_TAIL_BYTES:]
            for line in lines:
                log.debug("MCP server %s: %s", self._label, line[:_TAIL_BYTES].decode(errors="replace").rstrip())


@asynccontextmanager
async def process_streams(
    spec: ToolServerSpec, output: ErrorOutput, groups: set[int]
) -> AsyncIterator[TransportStreams]:
    """Starts the process. Leaving the context ends it, within three times `EXIT_SECONDS`. Meanwhile its group is one of
    `groups`."""
    with anyio.CancelScope(shield=True):  # a process that was started is always ended
        transport, process = await _started(spec)
    groups.add(process.pid)
    assert process.stdin and process.stdout and process.stderr
    to_client, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    sent, from_client = anyio.create_memory_object_stream[SessionMessage](0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read_messages, spec.label, process.stdout, to_client)
        tasks.start_soon(_write_messages, process.stdin, from_client)
        tasks.start_soon(output.read, process.stderr)
        try:
            yield received, sent
        finally:
            with anyio.CancelScope(shield=True):
                for stream in (received, sent):
                    stream.close()
                await _end(process)
                transport.close()  # a child that left the group may hold the pipes open
            groups.discard(process.pid)
            tasks.cancel_scope.cancel()


async def _started(spec: ToolServerSpec) -> tuple[asyncio.SubprocessTransport, Process]:
    """As `asyncio.create_subprocess_exec`, which does not give its transport to be closed."""
    assert spec.command is not None
    loop = asyncio.get_running_loop()
    try:
        transport, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(MAX_MESSAGE_BYTES, loop),
            spec.command,
            *spec.args,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=environment(spec),
            cwd=spec.cwd,
            start_new_session=True,  # a group of its own: a Ctrl-C is not for it, and its children end with it
        )
    except (OSError, ValueError) as error:  # uvloop's does not name the program
        place = f" in {spec.cwd}" if spec.cwd else ""
        reason = error.strerror if isinstance(error, OSError) else error
        raise ProcessFailed(f"cannot run {spec.command!r}{place}: {reason}") from error
    return transport, Process(transport, protocol, loop)


async def _read_messages(
    label: str, stdout: asyncio.StreamReader, to_client: MemoryObjectSendStream[SessionMessage | Exception]
) -> None:
    try:
        async with to_client:
            while line := await _line(stdout):
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValidationError:
                    log.debug("MCP server %s wrote a line that is not a message: %r", label, line[:200])
                    continue
                await to_client.send(SessionMessage(message))
    except anyio.BrokenResourceError:
        log.debug("MCP server %s: the connection is closed while it writes", label)
    while await stdout.read(_READ_BYTES):  # a process that waits for us to read would not end
        pass


async def _line(stdout: asyncio.StreamReader) -> bytes:
    try:
        return await stdout.readline()
    except ValueError as error:
        raise ProcessFailed(f"it sent a message of more than {MAX_MESSAGE_BYTES} bytes") from error


async def _write_messages(stdin: asyncio.StreamWriter, from_client: MemoryObjectReceiveStream[SessionMessage]) -> None:
    async with from_client:
        # A process that has closed its stdin has ended, or will: the end of its stdout is what counts.
        with suppress(ConnectionError):
            async for item in from_client:
                if stdin.is_closing():
                    break
                stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()


async def _end(process: Process) -> None:
    """As the MCP specification has it: close stdin, then SIGTERM, then SIGKILL. What is left of its group is killed."""
    assert process.stdin is not None
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        if await _has_ended(process):
            break
        signal_group(process.pid, number)
    signal_group(process.pid, signal.SIGKILL)
    if process.returncode is None:
        log.warning("the process %d of an MCP server does not end", process.pid)


async def _has_ended(process: Process) -> bool:
    with anyio.move_on_after(EXIT_SECONDS):
        await process.wait()  # and for its pipes, which a child of it may hold open: the group gets the signals
    return process.returncode is not None
