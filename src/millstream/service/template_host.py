"""A model's chat template, run by a child process that can be stopped: see `text/template_child.py`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
from collections.abc import Mapping
from concurrent.futures import Executor

import orjson

from millstream import sandbox
from millstream.errors import BadRequest
from millstream.text.conversation import Rendering
from millstream.text.template import TemplateSource
from millstream.text.template_child import CPU_SECONDS, LENGTH, RENDERED
from millstream.types import Kind

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds for one exchange. The child's own limit is on CPU time; this one is for a child that does not run at all."""
END_SECONDS = 0.5
GROWTH, ALLOWANCE = 4, 2**20
"""A prompt may have this many times the characters of its conversation, and so many more."""
_NO_TEMPLATE = "this model has no chat template: it continues text, so use /v1/completions"


class TemplateHost:
    """One prompt at a time, in the order in which they come. A child that was killed is replaced for the next.

    `note` says why the template cannot be used, if so: the model can still continue text.
    """

    def __init__(self, template: TemplateSource | None, pool: Executor) -> None:
        self._template = template
        self._pool = pool
        self._turn = asyncio.Lock()
        self._child: _Child | None = None
        self._abandoned: asyncio.Future[str] | None = None
        self._closed = False
        self.note = _NO_TEMPLATE if template is None else None

    async def open(self) -> None:
        """Have the template compiled."""
        if self._template is None:
            return
        async with self._turn:
            try:
                self._child = await self._started(self._template)
            except BadRequest as error:
                self.note = error.message

    async def render(self, job: bytes) -> str:
        """The prompt of a job that `job_of` made. Raises `BadRequest`."""
        if self.note is not None:
            raise BadRequest(self.note, param="messages")
        async with self._turn:
            if self._abandoned is not None:
                await asyncio.wait([self._abandoned])
            # A client that leaves must not leave half of an answer in the socket for the next.
            exchange = self._abandoned = asyncio.ensure_future(self._exchange(job))
            exchange.add_done_callback(_looked_at)
            return await asyncio.shield(exchange)

    async def close(self) -> None:
        """Returns when no process is left, also of an opening that is under way. Safe more than once."""
        self._closed = True
        await self._stop_child()
        async with self._turn:
            if self._abandoned is not None:
                await asyncio.wait([self._abandoned])
            await self._stop_child()

    async def _stop_child(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            await child.stop()

    async def _exchange(self, job: bytes) -> str:
        assert self._template is not None
        if self._child is None:
            self._child = await self._started(self._template)
        try:
            return await self._child.ask(job)
        except _Died as death:
            self._child = None
            raise BadRequest(str(death), param="messages") from death

    async def _started(self, template: TemplateSource) -> _Child:
        if self._closed:
            raise BadRequest("the model is being unloaded")
        child = await _Child.start(self._pool)
        try:
            await child.ask(orjson.dumps({"source": template.source, "tokens": dict(template.tokens)}))
        except _Died as death:
            raise BadRequest(f"the model's chat template cannot be used: {death}") from death
        except BaseException:
            await child.stop()
            raise
        return child


def job_of(rendering: Rendering, markers: Mapping[Kind, str] | None) -> bytes:
    """What a child is sent. `markers`: for a conversation with media, what stands for each kind."""
    parts = {"variants": rendering.variants, "kwargs": rendering.kwargs, "markers": markers}
    try:
        size = len(orjson.dumps(parts))
        return orjson.dumps({**parts, "limit": GROWTH * size + ALLOWANCE})
    except TypeError as error:
        raise BadRequest("the text is not valid Unicode: it holds half of a surrogate pair") from error


def _looked_at(exchange: asyncio.Future[str]) -> None:
    """What went wrong for a client that has left is nobody's business."""
    if not exchange.cancelled():
        exchange.exception()


class _Died(Exception):
    """The child has ended or was killed. Says why, for whoever sent the conversation."""


class _Child:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pool: Executor,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._pool = pool

    @classmethod
    async def start(cls, pool: Executor) -> _Child:
        """A load that is given up meanwhile leaves no process behind: a thread that starts one cannot be stopped."""
        starting = asyncio.ensure_future(cls._start(pool))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(_Died):
                await (await starting).stop()
            raise

    @classmethod
    async def _start(cls, pool: Executor) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.get_running_loop().run_in_executor(pool, _run, theirs)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        child = cls(process, reader, writer, pool)
        await child._answer()
        return child

    async def ask(self, job: bytes) -> str:
        self._writer.write(LENGTH.pack(len(job)) + job)
        verdict, text = await self._answer()
        if verdict != RENDERED:
            raise BadRequest(text, param="messages")
        return text

    async def stop(self) -> None:
        """Returns when it is gone. One that waits for work ends by itself when its socket closes."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await asyncio.get_running_loop().run_in_executor(self._pool, self._end)

    def _end(self) -> None:
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _answer(self) -> tuple[bytes, str]:
        try:
            async with asyncio.timeout(PATIENCE):
                await self._writer.drain()
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                data = await self._reader.readexactly(size)
        except (OSError, EOFError, TimeoutError) as error:  # TimeoutError is an OSError; named for the reader
            raise _Died(await self._cause()) from error
        return data[:1], data[1:].decode("utf-8", "surrogatepass")

    async def _cause(self) -> str:
        await self.stop()
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return f"the model's chat template took more than {CPU_SECONDS:g} s of CPU time"
        log.warning("the process of a chat template ended with code %d", code)
        return "the process that runs the model's chat template ended. Try again"


def _run(theirs: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        sandbox.command("millstream.text.template_child"),
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        env=sandbox.environment(),
        start_new_session=True,  # Ctrl-C is for the server
    )
