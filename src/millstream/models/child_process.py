"""Runs a program whose output is followed line by line, and that can be ended at any moment.

Downloads run so: a thread that waits for a network cannot be stopped, a process can.
"""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Callable, Mapping, Sequence

from millstream.errors import LoadCancelled

TICK_SECONDS = 0.1
"""How often a running child is looked at, besides for its output."""
END_SECONDS = 2.0
"""How long a child may take to clean up before it is killed."""


def run_child(
    command: Sequence[str],
    *,
    on_line: Callable[[str], None],
    on_tick: Callable[[], None] = lambda: None,
    cancelled: Callable[[], bool] = lambda: False,
    first_line: str = "",
    environment: Mapping[str, str] | None = None,
) -> int:
    """The exit code. `on_line` gets its output and errors; `first_line` is written to its input, which stays open while
    this process lives. Raises `LoadCancelled`, with the child ended, once `cancelled` is true."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # Ctrl-C in a terminal reaches this process alone, which then ends the child
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            if first_line:
                process.stdin.write(first_line.encode() + b"\n")
                process.stdin.flush()
            _follow(process.stdout.fileno(), on_line, on_tick, cancelled)
        except BaseException:
            _end(process)
            raise
    return process.returncode


def _follow(
    output: int, on_line: Callable[[str], None], on_tick: Callable[[], None], cancelled: Callable[[], bool]
) -> None:
    """Until the output ends."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            if cancelled():
                raise LoadCancelled("the download was stopped")
            on_tick()
            if not selector.select(TICK_SECONDS):
                continue
            data = os.read(output, 1 << 16)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines if data else [rest]:
                on_line(line.decode(errors="replace"))
            if not data:
                return


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
