"""Child process that checks grammars, one at a time: one line of JSON in, one line of JSON out.

Each job runs in a fork of the child, which may end in any way: a signal kills it when it exceeds its CPU time, stack or
memory, and the child kills it at an empty line, when no request needs the result any more. A fork takes 2 ms, a new
child 200 ms.

The server stops a job by a line and not by a signal, because lines stay in order: a signal that comes before the child
has read the job, or just before a system call, stops nothing.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
from typing import Any, NoReturn

from millstream import sandbox
from millstream.errors import BadRequest
from millstream.text.grammars.check import check_grammar
from millstream.types import Grammar

NICE = 5
"""Running rows and the server's event loop have priority."""
MEMORY = 1 << 30
"""Bytes of address space."""
STACK = 2 << 20
"""Bytes, less than an engine's thread has: a grammar that compiles here compiles there, too."""


def main() -> None:
    os.nice(NICE)
    sandbox.limit(memory=MEMORY, stack=STACK)
    check_grammar(Grammar("regex", "a"))  # builds what all forks share
    gc.freeze()
    _write(b"{}")  # ready
    lines = Lines(sys.stdin.fileno())
    while (line := lines.next()) is not None:
        if line:  # else the job to stop has already ended
            _write(_run(json.loads(line), lines))


class Lines:
    """Lines of a pipe, which `select` can wait for."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._read = b""

    def ready(self) -> bool:
        """Whether `next` returns at once, without reading the pipe."""
        return b"\n" in self._read

    def next(self) -> bytes | None:
        """The next line without its end; None at the end of the pipe."""
        pieces = [self._read]
        while b"\n" not in pieces[-1]:
            piece = os.read(self.fd, 1 << 16)
            if not piece:
                return None
            pieces.append(piece)
        line, _, self._read = b"".join(pieces).partition(b"\n")
        return line


def _run(job: dict[str, Any], lines: Lines) -> bytes:
    """Runs the job in a fork, which the next line stops, as does the end of the server."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        _work(job, writing)
    os.close(writing)
    reply = bytearray()
    while piece := _read(reading, lines, pid):
        reply += piece
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return bytes(reply) if code == 0 else json.dumps({"code": code}).encode()


def _read(reading: int, lines: Lines, pid: int) -> bytes:
    """The next piece of the fork's reply, empty at its end. Kills the fork at a line or at the end of the lines."""
    ready = [] if lines.ready() else select.select([reading, lines.fd], [], [])[0]
    if not ready or lines.fd in ready:
        os.kill(pid, signal.SIGKILL)  # which exists until `waitpid`
        lines.next()
    return os.read(reading, 1 << 16)


def _work(job: dict[str, Any], writing: int) -> NoReturn:
    """Runs the job in the fork, and exits."""
    code = 1
    try:
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])  # SIGPROF ends the process
        reply = _check(Grammar(job["kind"], job["source"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        with open(writing, "wb") as replies:
            replies.write(json.dumps(reply).encode())
        code = 0
    finally:
        os._exit(code)


def _check(grammar: Grammar) -> dict[str, str]:
    try:
        accepted = check_grammar(grammar)
    except BadRequest as error:
        return {"refused": error.message}
    # Most grammars are unchanged and need not be sent back.
    return {} if accepted is grammar else {"kind": accepted.kind, "source": accepted.source}


def _write(reply: bytes) -> None:
    sys.stdout.buffer.write(reply + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
