"""The child that checks grammars, one after the other: a line of JSON in, a line of JSON out.

A job that takes more CPU time than it may ends the child, as does one that exhausts the stack or the memory. Whoever
started it sees how it ended: see `service.grammar_process`.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from millstream.errors import BadRequest
from millstream.text.grammar_check import checked
from millstream.types import Grammar

MEMORY = 1 << 30
"""Of addresses."""
STACK = 2 << 20
"""Less than an engine's thread has, so that what passes here passes there."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this child
    _lower(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":  # macOS has these names as well, and does not hold the limits
        _lower(resource.RLIMIT_AS, MEMORY)
        _lower(resource.RLIMIT_STACK, STACK)
    _write({})  # ready
    for line in sys.stdin.buffer:
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])  # SIGPROF ends the process
        reply = _check(Grammar(job["kind"], job["source"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        _write({**reply, "peak": peak})


def _write(reply: dict[str, object]) -> None:
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()


def _check(grammar: Grammar) -> dict[str, str]:
    try:
        fit = checked(grammar)
    except BadRequest as error:
        return {"refused": error.message}
    # Most are as they were sent, and need not be sent back.
    return {} if fit is grammar else {"kind": fit.kind, "source": fit.source}


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    main()
