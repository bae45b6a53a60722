"""A child process that checks grammars, one at a time (`text.grammar_child`). Loop only.

llguidance can neither be interrupted nor asked how long it will take, and a deeply nested grammar exhausts its stack.
In a fork of the child it can be ended, and its end is a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal

from millstream import sandbox
from millstream.errors import BadRequest, EngineBusy, MillstreamError
from millstream.text.grammar_source import title_of
from millstream.types import Grammar

log = logging.getLogger(__name__)

PATIENCE = 10
"""How many times its CPU time a job may take by the clock: the machine may be busy with other work."""

START_SECONDS = 60
END_SECONDS = 5

MOST_REPLY = 16 << 20


class TooSlow(BadRequest):
    """The grammar takes longer to compile than it may."""


class GrammarProcess:
    """Started with the first job."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None

    async def check(self, grammar: Grammar, seconds: float) -> Grammar:
        """The grammar as an engine takes it. Raises `BadRequest`; `TooSlow` after so many seconds of CPU time. If this
        is cancelled, the work ends."""
        child = await self._ready()
        line = None
        try:
            async with asyncio.timeout(PATIENCE * seconds):
                line = await _ask(child, {"kind": grammar.kind, "source": grammar.source, "seconds": seconds})
        except TimeoutError as error:
            raise _too_slow(grammar, seconds) from error
        except ConnectionError:
            line = b""
        finally:
            if line is None:
                await self._stop_work(child)
        if not line:
            await self.close()
            raise EngineBusy("the check of a grammar was interrupted. Try again.", active=0, waiting=0, retry_after=1)
        reply = json.loads(line)
        if "code" in reply:
            raise _ended(grammar, seconds, reply["code"])
        if "refused" in reply:
            raise BadRequest(reply["refused"])
        return Grammar(reply["kind"], reply["source"]) if "source" in reply else grammar

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await asyncio.shield(child.wait())
        assert child.stdin is not None
        child.stdin.close()

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        child = self._child = await _start()
        said = b""
        try:
            async with asyncio.timeout(START_SECONDS):
                assert child.stdout is not None
                said = await child.stdout.readline()
        finally:
            if not said:
                await self.close()
        if not said:
            raise MillstreamError("the process that checks grammars does not start")
        return child

    async def _stop_work(self, child: asyncio.subprocess.Process) -> None:
        """Its reply is waited for, whatever it is: the next job has another."""
        try:
            child.send_signal(signal.SIGUSR1)
            async with asyncio.timeout(END_SECONDS):
                assert child.stdout is not None
                if await child.stdout.readline():
                    return
        except (ProcessLookupError, TimeoutError) as error:
            log.warning("a child that checks grammars does not end its work and is replaced: %r", error)
        await self.close()


async def _ask(child: asyncio.subprocess.Process, order: dict[str, object]) -> bytes:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(json.dumps(order).encode() + b"\n")
    await child.stdin.drain()
    return await child.stdout.readline()


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *sandbox.command("millstream.text.grammar_child"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=sandbox.environment(),
        limit=MOST_REPLY,
    )


def _too_slow(grammar: Grammar, seconds: float) -> TooSlow:
    title = title_of(grammar)
    return TooSlow(f"{title} takes too long to compile (more than {seconds:g} s). Make it smaller or simpler.")


def _ended(grammar: Grammar, seconds: float, code: int) -> BadRequest:
    match -code:
        case signal.SIGPROF:
            return _too_slow(grammar, seconds)
        case signal.SIGSEGV | signal.SIGBUS:
            return BadRequest(
                f"{title_of(grammar)} is nested too deeply: its parts refer to each other in a long chain."
            )
        case _:  # SIGABRT if the stack or the memory is exhausted, 1 after a panic
            log.warning("a child that checked a grammar of %d characters ended with %s", len(grammar.source), code)
            return BadRequest(f"{title_of(grammar)} cannot be compiled: it needs too much memory, or is malformed.")
