"""Connects to an MCP server: the pipes of a process that is started here, or HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import httpx2
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from millstream.config import ToolServerSpec
from millstream.service.mcp.process import MAX_MESSAGE_BYTES, ErrorOutput, process_streams

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream, TransportStreams

_CONNECT_SECONDS = 30.0
_READ_SECONDS = 3600.0
"""Of silence on a stream. Calls have a time limit of their own; a stream between calls may be silent for long."""


def transport(
    spec: ToolServerSpec, output: ErrorOutput, groups: set[int], on_end: Callable[[], None]
) -> AbstractAsyncContextManager[TransportStreams]:
    """The streams to and from a server, as a context that the client enters. Leaving it ends a process, within
    seconds; until then, its group is one of `groups`. `on_end` is called when the server's process or stream has
    ended."""
    return _watched(process_streams(spec, output, groups) if spec.command is not None else _http(spec), on_end)


@asynccontextmanager
async def _watched(
    streams: AbstractAsyncContextManager[TransportStreams], on_end: Callable[[], None]
) -> AsyncIterator[TransportStreams]:
    async with streams as (received, sent):
        yield _WatchedStream(received, on_end), sent


class _WatchedStream:
    """The messages of a server. The client of the mcp package fails its running calls when they end, but tells nobody
    if there are none."""

    def __init__(self, stream: ReadStream[SessionMessage | Exception], on_end: Callable[[], None]) -> None:
        self._stream = stream
        self._on_end = on_end

    async def receive(self) -> SessionMessage | Exception:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._on_end()
            raise

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stream.__aexit__(kind, error, trace)


@asynccontextmanager
async def _http(spec: ToolServerSpec) -> AsyncIterator[TransportStreams]:
    assert spec.url is not None
    headers = dict(spec.headers)
    if spec.transport == "sse":
        async with sse_client(spec.url, headers, _CONNECT_SECONDS, _READ_SECONDS) as streams:
            yield streams
        return
    limits = httpx2.Timeout(_CONNECT_SECONDS, read=_READ_SECONDS)
    async with (
        httpx2.AsyncClient(headers=headers, timeout=limits, event_hooks={"response": [_bound]}) as client,
        streamable_http_client(spec.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
    ):
        yield streams


async def _bound(response: httpx2.Response) -> None:
    """The client bounds the events of a stream, but not a whole JSON response."""
    if response.headers.get("content-type", "").startswith("application/json"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream)


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._stream:
            size += len(part)
            if size > MAX_MESSAGE_BYTES:
                # The client takes a StreamError for the failure of this one call.
                raise httpx2.StreamError(f"the response has more than {MAX_MESSAGE_BYTES} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
