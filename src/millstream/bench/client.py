"""Send one streaming request over a plain socket: the client must use less CPU than the server it measures."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import SplitResult

import httptools
import orjson

SHOWN = 2000
"""Bytes of a body that are remembered, to show what a server answered instead of a stream."""


@dataclass(slots=True)
class Sample:
    """Measurements of one request, in seconds of a monotonic clock."""

    started: float
    """When the request was sent, on a connection that was open."""
    arrivals: list[float] = field(default_factory=list)
    """When each chunk of text arrived."""
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The prompt tokens that the server says it took from its prefix cache."""
    accepted_tokens: int = 0
    """Tokens of drafts that the server says were right."""
    rejected_tokens: int = 0
    text: list[str] = field(default_factory=list)
    error: str | None = None
    cut: bool = False
    """Stopped before its end: the tokens are those that had arrived."""

    @property
    def first(self) -> float | None:
        return self.arrivals[0] - self.started if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


class _Reader:
    """Receives the HTTP parser's callbacks, splits the body into events and records when text arrived."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._rest = b""
        self._body = b""
        self._usage: int | None = None
        self.complete = False
        self.done = False

    def on_body(self, body: bytes) -> None:
        now = time.perf_counter()
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                self._take(orjson.loads(event[6:]), now)
            self.done = self.done or event == b"data: [DONE]"
        if len(self._body) < SHOWN:
            self._body = (self._body + body)[:SHOWN]

    def on_message_complete(self) -> None:
        self.complete = True

    def tokens(self) -> int:
        """The token count in `usage`, or the number of chunks if the server sent none."""
        return len(self._sample.arrivals) if self._usage is None else self._usage

    def start_of_body(self) -> str:
        return self._body.decode("utf-8", "replace")[:200]

    def _take(self, event: dict[str, object], now: float) -> None:
        if "error" in event:
            self._sample.error = str(event["error"])[:200]
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = int(usage["completion_tokens"])
            self._sample.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self._sample.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            details = usage.get("completion_tokens_details") or {}
            self._sample.accepted_tokens = int(details.get("accepted_prediction_tokens") or 0)
            self._sample.rejected_tokens = int(details.get("rejected_prediction_tokens") or 0)
        choices = event.get("choices")
        pieces = [_text(choice) for choice in choices] if isinstance(choices, list) else []
        if any(pieces):
            self._sample.arrivals.append(now)
            self._sample.text += pieces


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        text = delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content")
        return text or "".join(map(_called, delta.get("tool_calls") or ()))
    return choice.get("text") or ""


def _called(call: dict[str, Any]) -> str:
    """What a piece of a tool call adds to its function's name and arguments."""
    function = call.get("function") or {}
    return (function.get("name") or "") + (function.get("arguments") or "")


class Exchange(asyncio.Protocol):
    """One request on a connection of its own: connected first, then sent, so that many can start at the same moment.
    Chunks are timed and parsed where they arrive, without waking a task for each."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.WriteTransport | None = None
        self._body: _Reader | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._refused: OSError | None = None

    @classmethod
    async def open(cls, url: SplitResult, path: str, body: dict[str, object]) -> Exchange:
        """Connects. If that fails, `run` stores the error in its sample."""
        exchange = cls(request_bytes(url, path, body))
        try:
            await asyncio.get_running_loop().create_connection(lambda: exchange, url.hostname or "", url.port or 80)
        except OSError as error:
            exchange._refused = error
        return exchange

    async def run(self, sample: Sample, until: float | None = None) -> Sample:
        """Send the request and read its stream to the end. Errors are stored in the sample, not raised. `until`: when
        to stop, by the loop's clock."""
        sample.started = time.perf_counter()
        limit = asyncio.timeout_at(until)
        try:
            async with limit:
                await self._exchange(sample)
        except (OSError, httptools.HttpParserError, orjson.JSONDecodeError) as error:
            if limit.expired():
                sample.cut, sample.tokens = True, len(sample.arrivals)
            else:
                sample.error = f"{type(error).__name__}: {error}"
        finally:
            if self._transport is not None:
                self._transport.close()
        sample.ended = time.perf_counter()
        return sample

    async def _exchange(self, sample: Sample) -> None:
        if self._refused is not None:
            raise self._refused
        assert self._transport is not None
        self._body = body = _Reader(sample)
        self._parser = httptools.HttpResponseParser(body)
        self._transport.write(self._request)
        await self._over
        if not (body.complete or body.done):  # how an HTTP/1.0 server ends a response
            sample.error = sample.error or "the server closed the connection"
        sample.tokens = body.tokens()
        if self._parser.get_status_code() != 200:
            sample.error = f"{self._parser.get_status_code()}: {body.start_of_body()}"
        elif sample.error is None and not sample.arrivals:
            sample.error = f"no text received: {body.start_of_body()}"

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        if self._body is None or self._over.done():
            return  # the server speaks unasked, or after the end
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, orjson.JSONDecodeError) as error:
            self._over.set_exception(error)
        else:
            if self._body.complete:
                self._over.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)


async def stream(url: SplitResult, path: str, body: dict[str, object], sample: Sample | None = None) -> Sample:
    """Connect, then send one request and read its stream to the end. Errors are stored in the sample, not raised.

    Pass a sample to watch the stream while it runs.
    """
    exchange = await Exchange.open(url, path, body)
    return await exchange.run(Sample(0.0) if sample is None else sample)


def request_bytes(url: SplitResult, path: str, body: dict[str, object] | None) -> bytes:
    content = b"" if body is None else orjson.dumps(body)
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content


async def ping(url: SplitResult, path: str = "/health") -> float | None:
    """Seconds of a GET on a new connection. Returns None if it failed."""
    started = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            writer.write(request_bytes(url, path, None))
            line = await reader.readline()
        finally:
            writer.close()
    except OSError:
        return None
    return time.perf_counter() - started if b" 200 " in line else None
