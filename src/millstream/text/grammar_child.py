"""The child that checks grammars, one after the other: a line of JSON in, a line of JSON out.

Each job is done by a fork of it, which may end in any way: by a signal when it has used up its CPU time, its stack or
its memory, or on SIGUSR1 to the child when nobody waits for it any more. A fork takes 2 ms, a new child 200.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
from typing import Any, NoReturn

from millstream import sandbox
from millstream.errors import BadRequest
from millstream.text.grammar_check import checked
from millstream.types import Grammar

NICE = 5
"""Rows that run and the server's loop go before."""
MEMORY = 1 << 30
"""Of addresses."""
STACK = 2 << 20
"""Less than an engine's thread has, so that what passes here passes there."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this child
    os.nice(NICE)
    sandbox.limit(memory=MEMORY, stack=STACK)
    jobs = Jobs()
    signal.signal(signal.SIGUSR1, jobs.stop)
    checked(Grammar("regex", "a"))  # what is built at the first use is built for all forks
    gc.freeze()
    _write(b"{}")  # ready
    for line in sys.stdin.buffer:
        _write(jobs.run(json.loads(line)))


class Jobs:
    def __init__(self) -> None:
        self._fork: int | None = None

    def run(self, job: dict[str, Any]) -> bytes:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            _work(job, writing)
        self._fork = pid
        os.close(writing)
        with open(reading, "rb") as replies:
            reply = replies.read()
        _, status = os.waitpid(pid, 0)
        self._fork = None
        code = os.waitstatus_to_exitcode(status)
        return reply if code == 0 else json.dumps({"code": code}).encode()

    def stop(self, *_: object) -> None:
        """A handler of signals: it runs while `run` waits."""
        if self._fork is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._fork, signal.SIGKILL)


def _work(job: dict[str, Any], writing: int) -> NoReturn:
    """In the fork."""
    code = 1
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
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
        fit = checked(grammar)
    except BadRequest as error:
        return {"refused": error.message}
    # Most are as they were sent, and need not be sent back.
    return {} if fit is grammar else {"kind": fit.kind, "source": fit.source}


def _write(reply: bytes) -> None:
    sys.stdout.buffer.write(reply + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
