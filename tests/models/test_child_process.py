"""Programs that are followed line by line, and ended at any moment."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from millstream.errors import LoadCancelled
from millstream.models.child_process import run_child

TALK = "import sys; print('one'); print('two', file=sys.stderr); sys.stdout.write(sys.stdin.readline()); sys.exit(3)"
HANG = """
import os, signal, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(1000)
"""


def test_lines_input_and_exit_code() -> None:
    lines: list[str] = []
    command = [sys.executable, "-u", "-c", TALK]
    assert run_child(command, on_line=lines.append, first_line="three") == 3
    assert [line for line in lines if line] == ["one", "two", "three"]


@pytest.mark.parametrize("kind", ["plain", "deaf"])
def test_a_cancelled_child_is_gone(kind: str) -> None:
    lines: list[str] = []
    with pytest.raises(LoadCancelled):
        run_child([sys.executable, "-c", HANG, kind], on_line=lines.append, cancelled=lambda: bool(lines))
    assert not psutil.pid_exists(int(lines[0]))


def test_an_error_of_the_caller_ends_the_child(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child([sys.executable, "-c", HANG, "plain"], on_line=interrupt)
    assert not psutil.pid_exists(pids[0])
