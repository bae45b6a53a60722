"""Processes that are killed while they work, one after the other.

They are forked from one that has imported all there is: to start Python takes longer than most of what is killed here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import millstream

FORKS = sys.platform != "darwin"
"""On macOS a process that has loaded Apple's frameworks cannot be forked: it is started anew each time."""
_ORDER = "TEST_CHILD_ORDER"


def say(what: str, more: object = "") -> None:
    """A whole line or none of it: one that is killed leaves no half of one."""
    os.write(1, f"{what} {more}\n".encode())


def fork_for_each(work: Callable[[str], None]) -> None:
    """In the process that is forked: a child for each line on stdin, which works until it is killed."""
    if (order := os.environ.get(_ORDER)) is not None:
        say("pid", os.getpid())
        work(order)
        return
    while line := sys.stdin.readline():
        child = _begin(line.strip(), work)
        _, status = os.waitpid(child, 0)
        say("ended", os.waitstatus_to_exitcode(status))


def _begin(order: str, work: Callable[[str], None]) -> int:
    if not FORKS:
        return subprocess.Popen(sys.orig_argv, env=os.environ | {_ORDER: order}, stdin=subprocess.DEVNULL).pid
    child = os.fork()
    if not child:
        say("pid", os.getpid())
        try:
            work(order)
        except BaseException:  # noqa: BLE001 - it must not go on as the process that forks
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


class Forked:
    """In the test."""

    def __init__(self, module: str, *arguments: str) -> None:
        paths = [Path(millstream.__file__).parents[1], Path(__file__).parents[1]]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._pid = 0

    def begin(self, order: str) -> None:
        assert self._process.stdin is not None
        print(order, file=self._process.stdin, flush=True)
        self._pid = int(self.hear("pid")[-1])

    def hear(self, wanted: str) -> list[str]:
        """Everything that is said up to this word: what came with it is the last."""
        assert self._process.stdout is not None
        said = []
        while True:
            what, _, more = self._process.stdout.readline().rstrip("\n").partition(" ")
            assert what, "it has ended"
            said.append(more)
            if what == wanted:
                return said

    def kill(self) -> list[str]:
        """What it had still said."""
        os.kill(self._pid, signal.SIGKILL)
        *said, code = self.hear("ended")
        assert int(code) == -signal.SIGKILL, "it ended by itself"
        return said

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=20)
