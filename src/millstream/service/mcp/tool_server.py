"""One MCP server: its task connects, lists the tools, and connects again after the server has died.

One task owns the connection from its start to its end: the contexts of the mcp package hold cancel scopes, which must
be left by the task that entered them. Others send it signals. Calls run in the tasks of their callers.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import signal
from dataclasses import dataclass
from typing import Any, Literal

import anyio
from mcp import MCPError
from mcp.client import Client, IncomingMessage
from mcp.types import CONNECTION_CLOSED, Implementation, ToolListChangedNotification

from millstream import __version__
from millstream.config import ToolServerSpec
from millstream.errors import ToolServerFailed
from millstream.sandbox import signal_group
from millstream.service.mcp.listing import ToolListing
from millstream.service.mcp.process import ErrorOutput
from millstream.service.mcp.results import bounded, tool_output
from millstream.service.mcp.transport import transport
from millstream.service.ports import ServerTool, ToolOutput, ToolServerCard

log = logging.getLogger(__name__)

TOOLS_FRESH_SECONDS = 60.0
"""A list of tools that is older is read again when it is next asked for, in the background."""
LEAVE_SECONDS = 8.0
"""For a connection to close by itself. A process that does not want to end takes three times `EXIT_SECONDS`."""
CANCEL_SECONDS = 8.0
"""After that, for a connection that was cancelled."""
_MAX_REASON_CHARS = 500
_ENDED = "it has ended"


@dataclass(frozen=True, slots=True)
class Pauses:
    """Before a server that died is started again: the pause doubles, up to `longest`, until it ran for `steady`
    seconds. All in seconds."""

    first: float = 0.5
    longest: float = 60.0
    steady: float = 30.0


class _Signal(enum.Enum):
    ENDED = "the connection has ended"
    LIST = "list the tools again"
    CLOSE = "close the connection"


class _ConnectionEnded(Exception):
    """The server's process or stream has ended."""


class ToolServer:
    """`start` and `close` it once."""

    def __init__(self, spec: ToolServerSpec, pauses: Pauses) -> None:
        self._spec = spec
        self._pauses = pauses
        self._listing = ToolListing(spec)
        self._state: Literal["starting", "ready", "failed"] = "starting"
        self._error: str | None = None
        self._logged: str | None = None
        """The last error that was logged: the same one again is not worth a warning."""
        self._tools: tuple[ServerTool, ...] = ()
        self._listed_at = 0.0
        self._client: Client | None = None
        self._settled = asyncio.Event()
        """Set unless the state is `starting`."""
        self._signals: asyncio.Queue[_Signal] = asyncio.Queue()
        self._scope: anyio.CancelScope | None = None
        self._groups: set[int] = set()
        """Process groups that are running."""
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def card(self) -> ToolServerCard:
        return ToolServerCard(self._spec.label, self._state, self._error, self._tools)

    def start(self) -> None:
        self._task = asyncio.create_task(self._own(), name=f"mcp {self._spec.label}")

    async def tools(self) -> tuple[ServerTool, ...]:
        """Waits while the server starts. Raises `ToolServerFailed`."""
        await self._ready()
        if asyncio.get_running_loop().time() - self._listed_at > TOOLS_FRESH_SECONDS:
            self._list_soon()
        return self._tools

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """Every failure is an output."""
        label = self._spec.label
        try:
            with anyio.fail_after(self._spec.timeout):
                client = await self._ready()
                if not any(tool.name == name for tool in self._tools):
                    return ToolOutput(f"The MCP server {label!r} has no tool {name[:200]!r}.", is_error=True)
                result = await client.call_tool(name, arguments)
            return tool_output(result)
        except ToolServerFailed as error:
            return ToolOutput(error.message, is_error=True)
        except TimeoutError:
            limit = f"{self._spec.timeout:g} seconds"
            return ToolOutput(f"The call took longer than its time limit of {limit} and was ended.", is_error=True)
        except MCPError as error:
            # It may be the call's fault or the connection's, such as a session that the server has forgotten.
            self._list_soon()
            if error.code == CONNECTION_CLOSED:
                return ToolOutput(f"The MCP server {label!r} ended before it answered.", is_error=True)
            return ToolOutput(bounded(f"The call failed: {error.message}"), is_error=True)
        except Exception as error:  # a server may send anything, and the client raises what it makes of it
            log.warning("MCP server %s: a call of %s failed", label, name, exc_info=True)
            return ToolOutput(f"The call failed: {_reason(error)}", is_error=True)

    async def close(self) -> None:
        """Ends the connection and the process, in bounded time. Running calls fail."""
        self._closing.set()
        self._signals.put_nowait(_Signal.CLOSE)
        if self._task is None:
            return
        if self._client is None and self._scope is not None:
            self._scope.cancel()  # it is connecting, and reads no signals
        if not (await asyncio.wait([self._task], timeout=LEAVE_SECONDS))[0] and self._scope is not None:
            self._scope.cancel()
            await asyncio.wait([self._task], timeout=CANCEL_SECONDS)
        if not self._task.done():
            log.warning("MCP server %s does not end and is abandoned", self._spec.label)
            self._task.cancel()

    def kill(self) -> None:
        """Ends its process without waiting."""
        for group in self._groups:
            signal_group(group, signal.SIGKILL)

    async def _ready(self) -> Client:
        await self._settled.wait()
        if self._client is None:
            raise ToolServerFailed(f"The MCP server {self._spec.label!r} is not available: {self._error}.")
        return self._client

    def _list_soon(self) -> None:
        if self._signals.empty():
            self._signals.put_nowait(_Signal.LIST)

    async def _own(self) -> None:
        """The task: one connection after another."""
        now = asyncio.get_running_loop().time
        pause = self._pauses.first
        while not self._closing.is_set():
            output = ErrorOutput(self._spec.label)
            began, self._listed_at = now(), 0.0
            try:
                await self._live(output)
                error = "the server is shutting down"
            except Exception as failure:  # any library may raise here, and a connection to another program may fail
                log.debug("MCP server %s", self._spec.label, exc_info=True)
                error = _reason(failure)
            was_ready = self._listed_at > 0
            if was_ready and now() - began > self._pauses.steady:
                pause = self._pauses.first
            if self._closing.is_set():
                self._change("failed", error)
                return
            self._log_failure(error, output, pause)
            # Whoever calls a tool now waits for the first new attempt, but not for later ones.
            self._change("starting" if was_ready and pause == self._pauses.first else "failed", error)
            await self._rest(pause)
            pause = min(2 * pause, self._pauses.longest)

    async def _live(self, output: ErrorOutput) -> None:
        """One connection, until it ends or the server is closed. Raises if it cannot be made, or ends by itself."""
        self._signals = signals = asyncio.Queue[_Signal]()
        if self._closing.is_set():
            return
        client = Client(
            transport(self._spec, output, self._groups, on_end=lambda: self._on_end(signals)),
            client_info=Implementation(name="millstream", version=__version__),
            message_handler=self._on_message,
            cache=None,
        )
        limit = self._spec.start_timeout
        # The deadline is lifted once the server is ready: a scope of its own could not be left before the client's.
        with anyio.CancelScope(deadline=anyio.current_time() + limit) as scope:
            self._scope = scope
            async with client:
                self._keep(await self._listing.read(client))
                scope.deadline = math.inf
                try:
                    self._client = client
                    self._change("ready", None)
                    self._logged = None
                    log.info("MCP server %s is ready: %d tools", self._spec.label, len(self._tools))
                    await self._obey(signals, client)
                finally:
                    self._lose("it is being disconnected")
        if scope.cancelled_caught and not self._closing.is_set():
            raise TimeoutError(f"it was not ready within {limit:g} seconds")

    def _on_end(self, signals: asyncio.Queue[_Signal]) -> None:
        signals.put_nowait(_Signal.ENDED)
        self._lose(_ENDED)

    def _lose(self, error: str) -> None:
        """Changes the state at once: the task may take seconds to leave the connection."""
        if self._client is not None:
            self._client = None
            self._change("failed" if self._closing.is_set() else "starting", error)

    async def _obey(self, signals: asyncio.Queue[_Signal], client: Client) -> None:
        while (order := await signals.get()) is not _Signal.CLOSE:
            if order is _Signal.ENDED:
                raise _ConnectionEnded(_ENDED)
            try:
                with anyio.fail_after(self._spec.start_timeout):
                    self._keep(await self._listing.read(client))
            except TimeoutError as error:
                raise _ConnectionEnded("it does not answer") from error

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._list_soon()

    def _keep(self, tools: tuple[ServerTool, ...]) -> None:
        self._tools = tools
        self._listed_at = asyncio.get_running_loop().time()

    def _change(self, state: Literal["starting", "ready", "failed"], error: str | None) -> None:
        self._state, self._error = state, error
        if state == "starting":
            self._settled.clear()
        else:
            self._settled.set()

    def _log_failure(self, error: str, output: ErrorOutput, pause: float) -> None:
        level = logging.DEBUG if error == self._logged else logging.WARNING
        self._logged = error
        # Not part of the card: whatever a program prints may hold its secrets.
        tail = f". It wrote: {output.tail}" if output.tail else ""
        log.log(level, "MCP server %s: %s; starting it again in %g s%s", self._spec.label, error, pause, tail)

    async def _rest(self, pause: float) -> None:
        with anyio.move_on_after(pause):
            await self._closing.wait()


def _reason(error: BaseException) -> str:
    """Why a connection failed, for people. Task groups of the mcp package wrap errors in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(error) or type(error).__name__
    if isinstance(error, MCPError) and error.code == CONNECTION_CLOSED:
        text = "it ended before it was ready"
    return text[:_MAX_REASON_CHARS]
