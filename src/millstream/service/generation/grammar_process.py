"""Checks grammars in a child process, one at a time (`text/grammars/child.py`). For the event loop only.

llguidance cannot be interrupted or predict how long it takes, and a deeply nested grammar overflows its stack. A fork
of the child can be killed, and its death means that the grammar is refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal

from millstream import sandbox
from millstream.errors import BadRequest, EngineBusy, MillstreamError
from millstream.text.grammars.source import title_of
from millstream.types import Grammar

log = logging.getLogger(__name__)

CLOCK_FACTOR = 10
"""A job may take this many times its CPU limit by the clock, because the machine may be busy with other work."""

START_SECONDS = 60
"""Seconds for the child to start."""
STOP_SECONDS = 5
"""Seconds for the child to stop a job, and to be gone once it is killed."""

MAX_REPLY_BYTES = 16 << 20


class TooSlow(BadRequest):
    """Compiling the grammar exceeds the time limit."""


class GrammarProcess:
    """One child, started with the first job."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None

    async def check(self, grammar: Grammar, seconds: float) -> Grammar:
        """Returns the grammar in the form that engines accept. Raises `BadRequest` if it cannot be compiled, `TooSlow`
        if that takes more than `seconds` of CPU time. If this is cancelled, the job is stopped."""
        child = await self._running_child()
        line = None
        try:
            async with asyncio.timeout(CLOCK_FACTOR * seconds):
                line = await _ask(child, {"kind": grammar.kind, "source": grammar.source, "seconds": seconds})
        except TimeoutError as error:
            raise _too_slow(grammar, seconds) from error
        except ConnectionError:
            line = b""
        finally:
            if line is None:
                await self._stop_job(child)
        if not line:
            await self.close()
            raise EngineBusy("the check of the grammar was interrupted. Try again.", active=0, waiting=0, retry_after=1)
        reply = json.loads(line)
        if "code" in reply:
            raise _refusal(grammar, seconds, reply["code"])
        if "refused" in reply:
            raise BadRequest(reply["refused"])
        return Grammar(reply["kind"], reply["source"]) if "source" in reply else grammar

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        sandbox.signal_group(child.pid, signal.SIGKILL)
        # It returns once all have closed the child's pipes, and who has left its group may hold them.
        _, left = await asyncio.wait([asyncio.ensure_future(child.wait())], timeout=STOP_SECONDS)
        if left:
            log.warning("the process %d that checks grammars was killed and does not end", child.pid)
        assert child.stdin is not None
        child.stdin.close()

    async def _running_child(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        child = self._child = await _start()
        ready = b""
        try:
            async with asyncio.timeout(START_SECONDS):
                assert child.stdout is not None
                ready = await child.stdout.readline()
        finally:
            if not ready:
                await self.close()
        if not ready:
            raise MillstreamError("the process that checks grammars did not start")
        return child

    async def _stop_job(self, child: asyncio.subprocess.Process) -> None:
        """Stops the job and discards its reply, so that the next job does not read it. Replaces a child that does not
        answer."""
        try:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(b"\n")
            async with asyncio.timeout(STOP_SECONDS):
                if await child.stdout.readline():
                    return
        except (ConnectionError, TimeoutError) as error:
            log.warning("the process that checks grammars did not stop its job and is replaced: %r", error)
        await self.close()


async def _ask(child: asyncio.subprocess.Process, job: dict[str, object]) -> bytes:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(json.dumps(job).encode() + b"\n")
    await child.stdin.drain()
    return await child.stdout.readline()


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *sandbox.command("millstream.text.grammars.child"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=sandbox.environment(),
        limit=MAX_REPLY_BYTES,
        start_new_session=True,  # a group of its own: the fork of a job ends with the child, also one that is stopped
    )


def _too_slow(grammar: Grammar, seconds: float) -> TooSlow:
    title = title_of(grammar)
    return TooSlow(f"{title} takes too long to compile (more than {seconds:g} s). Make it smaller or simpler.")


def _refusal(grammar: Grammar, seconds: float, code: int) -> BadRequest:
    match -code:
        case signal.SIGPROF:
            return _too_slow(grammar, seconds)
        case signal.SIGSEGV | signal.SIGBUS:
            return BadRequest(
                f"{title_of(grammar)} is nested too deeply, or its definitions refer to each other in a long chain."
            )
        case _:  # SIGABRT if stack or memory is exhausted, 1 after a panic
            log.warning("checking a grammar of %d characters ended with exit code %s", len(grammar.source), code)
            return BadRequest(f"{title_of(grammar)} cannot be compiled: it needs too much memory or is malformed.")
