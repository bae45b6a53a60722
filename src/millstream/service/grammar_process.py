"""A child process that checks grammars, one at a time (`text.grammar_child`). Loop only.

llguidance can neither be interrupted nor asked how long it will take, and a deeply nested grammar exhausts its stack: a
child can be ended, and its end is a refusal. A new one is started for the next job.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys

from millstream.errors import BadRequest, MillstreamError
from millstream.text.grammar_source import title_of
from millstream.types import Grammar

log = logging.getLogger(__name__)

PATIENCE = 8
"""How many times its CPU time a job may take by the clock: the machine may be busy with other work."""

MOST_MEMORY = 200 << 20
"""A child that has needed more is replaced, since it would not give it back."""

START_SECONDS = 60
END_SECONDS = 5

MOST_REPLY = 16 << 20

_PASSED = frozenset(
    {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "HOME", "TMPDIR"}
)
"""What a child needs to start, and no more: keys of the server are none of its business."""


class TooSlow(BadRequest):
    """The grammar takes longer to compile than it may."""


class GrammarProcess:
    """Started with the first job, and again after each that ended it."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None

    async def check(self, grammar: Grammar, seconds: float) -> Grammar:
        """The grammar as an engine takes it. Raises `BadRequest`; `TooSlow` after so many seconds of CPU time. If this
        is cancelled, the child is ended."""
        child, line, ended = None, b"", False
        try:
            child = await self._ready()
            async with asyncio.timeout(PATIENCE * seconds):
                line = await _ask(child, {"kind": grammar.kind, "source": grammar.source, "seconds": seconds})
            ended = not line
        except TimeoutError as error:
            raise _too_slow(grammar, seconds) from error
        except ConnectionError:
            ended = True
        finally:
            if not line:
                await self.close(ended=ended)
        if not line:
            raise _ended(grammar, seconds, child.returncode if child else None)
        reply = json.loads(line)
        if reply["peak"] > MOST_MEMORY:
            await self.close()
        if "refused" in reply:
            raise BadRequest(reply["refused"])
        return Grammar(reply["kind"], reply["source"]) if "source" in reply else grammar

    async def close(self, *, ended: bool = False) -> None:
        """`ended`: it closed its output, so it is about to be gone; how it ended tells why."""
        child, self._child = self._child, None
        if child is None:
            return
        if ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), END_SECONDS)
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await asyncio.shield(child.wait())
        assert child.stdin is not None
        child.stdin.close()

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await _start()
            async with asyncio.timeout(START_SECONDS):
                assert self._child.stdout is not None
                if not await self._child.stdout.readline():  # its time to start is not the grammar's
                    raise MillstreamError("the process that checks grammars does not start")
        return self._child


async def _ask(child: asyncio.subprocess.Process, order: dict[str, object]) -> bytes:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(json.dumps(order).encode() + b"\n")
    await child.stdin.drain()
    return await child.stdout.readline()


async def _start() -> asyncio.subprocess.Process:
    # -P: nothing is imported from the folder that the server was started in.
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "millstream.text.grammar_child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name in _PASSED},
        limit=MOST_REPLY,
    )


def _too_slow(grammar: Grammar, seconds: float) -> TooSlow:
    title = title_of(grammar)
    return TooSlow(f"{title} takes too long to compile (more than {seconds:g} s). Make it smaller or simpler.")


def _ended(grammar: Grammar, seconds: float, code: int | None) -> BadRequest:
    match -(code or 0):
        case signal.SIGPROF:
            return _too_slow(grammar, seconds)
        case signal.SIGSEGV | signal.SIGBUS:
            return BadRequest(
                f"{title_of(grammar)} is nested too deeply: its parts refer to each other in a long chain."
            )
        case _:  # SIGABRT if the stack or the memory is exhausted, 1 after a panic
            log.warning("a child that checked a grammar of %d characters ended with %s", len(grammar.source), code)
            return BadRequest(f"{title_of(grammar)} cannot be compiled: it needs too much memory, or is malformed.")
