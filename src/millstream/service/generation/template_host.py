"""A model's chat template, run by a child process that can be stopped: see `text/template_child.py`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor

import orjson

from millstream import sandbox
from millstream.errors import BadRequest
from millstream.text.conversation import TemplateInput
from millstream.text.template import TemplateSource
from millstream.text.template_child import CPU_SECONDS, LENGTH, RENDERED
from millstream.types import Kind

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds without an answer. The child's own limit is on CPU time; this one is for a child that does not run at all."""
END_SECONDS = 0.5
GROWTH, ALLOWANCE = 4, 2**20
"""A prompt may have this many times the characters of its conversation, and so many more."""
_NO_TEMPLATE = "this model has no chat template: it continues text, so use /v1/completions"


class TemplateHost:
    """Prompts are rendered in the order in which they come. A child that has died is replaced for the next, and whoever
    waited behind the prompt that it died of is asked again.

    `note` says why the template cannot be used, if so: the model can still continue text.
    """

    def __init__(self, template: TemplateSource | None, pool: Executor) -> None:
        self._template = template
        self._pool = pool
        self._starting = asyncio.Lock()
        self._child: _Child | None = None
        self._closed = False
        self.note = _NO_TEMPLATE if template is None else None

    async def open(self) -> None:
        """Have the template compiled."""
        if self._template is None:
            return
        try:
            await self._ready(self._template)
        except BadRequest as error:
            self.note = error.message

    async def render(self, job: bytes) -> str:
        """The prompt of a job that `job_of` made. Raises `BadRequest`."""
        if self.note is not None or self._template is None:
            raise BadRequest(self.note or _NO_TEMPLATE, param="messages")
        while True:
            child = await self._ready(self._template)
            try:
                return await child.ask(job)
            except _Lost:
                continue
            except _Died as death:
                raise BadRequest(str(death), param="messages") from death

    async def close(self) -> None:
        """Returns when no process is left, also of an opening that is under way. Safe more than once."""
        self._closed = True
        await self._stop_child()
        async with self._starting:
            await self._stop_child()

    async def _stop_child(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            await child.stop()

    async def _ready(self, template: TemplateSource) -> _Child:
        if self._child is not None and not self._child.dead:
            return self._child
        async with self._starting:
            if self._child is None or self._child.dead:
                self._child = await self._started(template)
            return self._child

    async def _started(self, template: TemplateSource) -> _Child:
        if self._closed:
            raise BadRequest("the model is being unloaded")
        child = await _Child.start(self._pool)
        try:
            await child.ask(orjson.dumps({"source": template.source, "tokens": dict(template.tokens)}))
        except (_Died, _Lost) as death:
            raise BadRequest(f"the model's chat template cannot be used: {death}") from death
        except BaseException:
            await child.stop()
            raise
        return child


def job_of(rendering: TemplateInput, markers: Mapping[Kind, str] | None) -> bytes:
    """What a child is sent. `markers`: for a conversation with media, what stands for each kind."""
    parts = {"variants": rendering.variants, "kwargs": rendering.kwargs, "markers": markers}
    try:
        size = len(orjson.dumps(parts))
        return orjson.dumps({**parts, "limit": GROWTH * size + ALLOWANCE})
    except TypeError as error:
        raise BadRequest("the text is not valid Unicode: it contains an unpaired surrogate") from error


class _Died(Exception):
    """The child has ended over this prompt. Says why, for whoever sent it."""


class _Lost(Exception):
    """The child has ended over another prompt."""


class _Child:
    """One process. What it is asked is written at once, and answered in that order by the task that reads."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pool: Executor,
    ) -> None:
        self.dead = False
        self._process = process
        self._reader = reader
        self._writer = writer
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._answered = self._loop.time()
        """When the last answer came."""
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, pool: Executor) -> _Child:
        """A load that is given up meanwhile leaves no process behind: a thread that starts one cannot be stopped."""
        starting = asyncio.ensure_future(cls._start(pool))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await (await starting).stop()
            raise

    @classmethod
    async def _start(cls, pool: Executor) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.get_running_loop().run_in_executor(pool, _run, theirs)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer, pool)

    async def ask(self, job: bytes) -> str:
        """Raises `BadRequest` with what the template says, `_Died`, or `_Lost`."""
        if self.dead:
            raise _Lost
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting.append(answer)
        self._writer.write(LENGTH.pack(len(job)) + job)
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=PATIENCE)
                if not answer.done() and self._loop.time() - self._answered > PATIENCE:
                    self._process.kill()  # the reading task then tells everyone
        except asyncio.CancelledError:
            answer.cancel()  # its place in the line stays
            raise
        data = answer.result()
        text = data[1:].decode("utf-8", "surrogatepass")
        if data[:1] != RENDERED:
            raise BadRequest(text, param="messages")
        return text

    async def stop(self) -> None:
        """Returns when it is gone. One that waits for work ends by itself when its socket closes."""
        self._writer.close()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        try:
            while True:
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                data = await self._reader.readexactly(size)
                self._answered = self._loop.time()
                answer = self._waiting.popleft()
                if not answer.done():
                    answer.set_result(data)
        except (OSError, EOFError):
            await self._bury()

    async def _bury(self) -> None:
        self.dead = True
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await self._loop.run_in_executor(self._pool, self._end)
        error: Exception = _Died(self._cause())
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(error)
            error = _Lost()

    def _end(self) -> None:
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _cause(self) -> str:
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return f"the model's chat template took more than {CPU_SECONDS:g} s of CPU time"
        if self._waiting:
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
