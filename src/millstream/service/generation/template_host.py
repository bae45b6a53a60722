"""Renders prompts with a model's chat template in a sandboxed child process (`text/templates/child.py`).

A template is an untrusted program: one that loops or exhausts memory costs its own request only, and the child is
replaced.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from typing import cast

import orjson

from millstream import sandbox
from millstream.errors import BadRequest, EngineGone
from millstream.exact_json import dumps
from millstream.service.turnstile import turnstile
from millstream.text.templates.abilities import ABLE, TemplateAbilities
from millstream.text.templates.child import CPU_SECONDS, LENGTH, RENDERED
from millstream.text.templates.conversation import TemplateInput
from millstream.text.templates.template import TemplateSource
from millstream.types import Kind

log = logging.getLogger(__name__)

REPLY_TIMEOUT = 60.0
"""Seconds without a reply until the child is killed. The child limits its own CPU time; this timeout is for one that
gets no CPU at all."""
EXIT_TIMEOUT = 0.5
"""Seconds for the child to exit after its socket is closed. Then it is killed."""
GROWTH_FACTOR, EXTRA_CHARACTERS = 4, 2**20
"""A prompt may have up to this many times the size of its conversation as JSON, plus the extra characters."""
_NO_TEMPLATE = "this model has no chat template, so it cannot answer chats. Use /v1/completions"


class TemplateHost:
    """Renders prompts in order of arrival. If the child dies, the prompt that it was rendering fails, a new child is
    started, and the prompts queued behind it are sent again.

    `note` is the reason if the template cannot be used: the model can still serve text completions. Otherwise None.
    """

    def __init__(self, template: TemplateSource | None, pool: Executor) -> None:
        self._template = template
        self._pool = pool
        self._starting = asyncio.Lock()
        self._child: _Child | None = None
        self._compiling: _Child | None = None
        """A child that has not compiled the template yet."""
        self._closed = False
        self.note = _NO_TEMPLATE if template is None else None
        self.abilities = ABLE
        """What the template can render. Known after `open`."""

    async def open(self) -> None:
        """Starts the child, which compiles the template and probes what it can render. Sets `note` if that fails."""
        if self._template is None:
            return
        try:
            await self._running_child(self._template)
        except BadRequest as error:
            self.note = error.message

    async def render(self, job: bytes) -> str:
        """Returns the prompt for a job from `render_job`. Raises `BadRequest` if it cannot be rendered."""
        if self.note is not None or self._template is None:
            raise BadRequest(self.note or _NO_TEMPLATE, param="messages")
        while True:
            child = await self._running_child(self._template)
            try:
                return await child.ask(job)
            except _DiedEarlier:
                continue
            except _Died as error:
                if self._closed:
                    raise self._unloaded() from error
                raise BadRequest(str(error), param="messages") from error

    async def close(self) -> None:
        """Stops the child, even if `open` is still starting it. Safe to call more than once: each call waits for its
        exit."""
        self._closed = True
        await self._stop_children()
        async with self._starting:
            await self._stop_children()

    async def _stop_children(self) -> None:
        children = (self._child, self._compiling)
        await asyncio.gather(*(child.stop() for child in children if child is not None))

    @staticmethod
    def _unloaded() -> EngineGone:
        return EngineGone("the model is being unloaded")

    async def _running_child(self, template: TemplateSource) -> _Child:
        if self._child is not None and not self._child.dead:
            return self._child
        async with self._starting:
            if self._child is None or self._child.dead:
                self._child = await self._start_child(template)
            return self._child

    async def _start_child(self, template: TemplateSource) -> _Child:
        if self._closed:
            raise self._unloaded()
        child = self._compiling = await _Child.start(self._pool)
        try:
            if self._closed:
                raise self._unloaded()
            found = await child.ask(orjson.dumps({"source": template.source, "tokens": dict(template.tokens)}))
            self.abilities = TemplateAbilities.from_json(orjson.loads(found))
        except (_Died, _DiedEarlier) as error:
            raise BadRequest(f"the model's chat template cannot be used: {error}") from error
        except BaseException:
            await child.stop()
            raise
        finally:
            self._compiling = None
        return child


def render_job(template_input: TemplateInput, markers: Mapping[Kind, str] | None) -> bytes:
    """Returns the message that has the child render a prompt. `markers`: for a conversation with media, the placeholder
    of each kind."""
    job = {
        "variants": template_input.variants,
        "kwargs": template_input.kwargs,
        "continues": template_input.continues,
        "markers": markers,
    }
    try:
        size = len(dumps(job))
        return dumps({**job, "limit": GROWTH_FACTOR * size + EXTRA_CHARACTERS})
    except ValueError as error:
        raise BadRequest("the text is not valid Unicode: it contains an unpaired surrogate") from error


class _Died(Exception):
    """The child ended while it rendered this prompt. The message is for the client."""


class _DiedEarlier(Exception):
    """The child ended before it rendered this prompt, so the prompt can be sent again."""


class _Child(asyncio.Protocol):
    """One process. Jobs are written at once, and its replies come in the same order."""

    def __init__(self, process: subprocess.Popen[bytes], pool: Executor) -> None:
        self.dead = False
        self._stopping = False
        self._process = process
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._replies: deque[asyncio.Future[bytes]] = deque()
        self._last_reply = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        """Runs while replies are due."""
        self._exit: asyncio.Task[None] | None = None
        self._gone: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def start(cls, pool: Executor) -> _Child:
        """Starts a child. If this is cancelled, the child is stopped once it runs: the thread that starts it cannot be
        interrupted."""
        starting = asyncio.ensure_future(cls._start(pool))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await (await starting).stop()
            raise

    @classmethod
    async def _start(cls, pool: Executor) -> _Child:
        loop = asyncio.get_running_loop()
        parent_end, child_end = socket.socketpair()
        with child_end:
            process = await loop.run_in_executor(pool, _spawn, child_end)
        _, child = await loop.create_unix_connection(lambda: cls(process, pool), sock=parent_end)
        return child

    async def ask(self, job: bytes) -> str:
        """Returns the child's reply. Raises `BadRequest` with the template's own error, `_Died`, or `_DiedEarlier`."""
        if self.dead or self._transport is None:
            raise _DiedEarlier
        reply: asyncio.Future[bytes] = self._loop.create_future()
        if not self._replies:
            self._last_reply = self._loop.time()
        self._replies.append(reply)
        self._transport.write(LENGTH.pack(len(job)) + job)
        if self._timer is None:
            self._timer = self._loop.call_later(REPLY_TIMEOUT, self._check)
        # If this is cancelled, the reply stays in the queue, because the child will still answer.
        data = await reply
        text = data[1:].decode("utf-8", "surrogatepass")
        if data[:1] != RENDERED:
            raise BadRequest(text, param="messages")
        return text

    async def stop(self) -> None:
        """Closes the socket, upon which an idle child exits, and waits until the process is gone."""
        self._stopping = True
        if self._transport is not None:
            self._transport.close()
        await asyncio.wait([self._gone])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(received)[0]
            if len(received) < end:
                return
            self._last_reply = self._loop.time()
            give = partial(_give, self._replies.popleft(), bytes(received[LENGTH.size : end]))
            del received[:end]
            turnstile().enter(give, begun=True)  # of many at once, each request goes on in a turn of its own

    def connection_lost(self, error: Exception | None) -> None:
        self.dead = True
        self._exit = asyncio.ensure_future(self._handle_exit())

    def _check(self) -> None:
        """Kills a child that has not answered for too long: all replies that are due then fail."""
        self._timer = None
        if not self._replies:
            return
        left = self._last_reply + REPLY_TIMEOUT - self._loop.time()
        if left <= 0:
            self._process.kill()
        else:
            self._timer = self._loop.call_later(left, self._check)

    async def _handle_exit(self) -> None:
        """Waits for the process and fails the pending replies: the first with the cause, the others for a retry."""
        if self._timer is not None:
            self._timer.cancel()
        await self._loop.run_in_executor(self._pool, self._wait)
        error: Exception = _Died(self._exit_reason())
        for reply in self._replies:
            if not reply.done():
                reply.set_exception(error)
            error = _DiedEarlier()
        self._gone.set_result(None)

    def _wait(self) -> None:
        try:
            self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _exit_reason(self) -> str:
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return f"the model's chat template took more than {CPU_SECONDS:g} s of CPU time"
        if self._replies and not self._stopping:
            log.warning("the chat template process exited unexpectedly with code %d", code)
        return "the process that renders the model's chat template ended unexpectedly. Try again"


def _give(reply: asyncio.Future[bytes], data: bytes) -> None:
    if not reply.done():
        reply.set_result(data)


def _spawn(child_end: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        sandbox.command("millstream.text.templates.child"),
        stdin=child_end.fileno(),
        stdout=subprocess.DEVNULL,
        env=sandbox.environment(),
        start_new_session=True,  # Ctrl-C is for the server
    )
