"""Child process that checks grammars, one at a time: one line of JSON in, one line of JSON out.

Each job runs in a fork of the child, which may end in any way: a signal kills it when it exceeds its CPU time, stack or
memory, and the child kills it on SIGUSR1, when no request needs the result any more. A fork takes 2 ms, a new child
200 ms.
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
from millstream.text.grammars.check import check_grammar
from millstream.types import Grammar

NICE = 5
"""Running rows and the server's event loop have priority."""
MEMORY = 1 << 30
"""Bytes of address space."""
STACK = 2 << 20
"""Bytes, less than an engine's thread has: a grammar that compiles here compiles there, too."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which stops this child
    os.nice(NICE)
    sandbox.limit(memory=MEMORY, stack=STACK)
    jobs = JobRunner()
    signal.signal(signal.SIGUSR1, jobs.stop)
    check_grammar(Grammar("regex", "a"))  # builds what all forks share
    gc.freeze()
    _write(b"{}")  # ready
    for line in sys.stdin.buffer:
        _write(jobs.run(json.loads(line)))


class JobRunner:
    """Runs each job in a fork."""

    def __init__(self) -> None:
        self._fork: int | None = None

    def run(self, job: dict[str, Any]) -> bytes:
        reading, writing = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # a stop must not come before the fork is known
        pid = os.fork()
        if not pid:
            _work(job, writing)
        self._fork = pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        os.close(writing)
        with open(reading, "rb") as replies:
            reply = replies.read()
        _, status = os.waitpid(pid, 0)
        self._fork = None
        code = os.waitstatus_to_exitcode(status)
        return reply if code == 0 else json.dumps({"code": code}).encode()

    def stop(self, *_: object) -> None:
        """Signal handler that kills the current fork. It runs while `run` waits for it."""
        if self._fork is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._fork, signal.SIGKILL)


def _work(job: dict[str, Any], writing: int) -> NoReturn:
    """Runs the job in the fork, and exits."""
    code = 1
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
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
