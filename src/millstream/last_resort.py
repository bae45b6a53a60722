"""Ends the process when its stop does not end, and says in the log what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

log = logging.getLogger(__name__)

LOG_SECONDS = 0.8
"""For the log to take the last lines: whoever reads it may have stopped reading."""
_IDLE = (threading.__file__, "concurrent/futures/thread.py", "selectors.py")
"""Where threads wait for work."""
_RUNNING_CHILD = frozenset("RSDTt")
"""The states of a process that has not ended, in Linux's own letters."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop that has begun."""

    seconds: float
    """It may take as long."""
    code: int
    kill: Callable[[], None]
    """Ends child processes that would outlive this one. Does not wait."""
    loop: asyncio.AbstractEventLoop


class LastResort(threading.Thread):
    """A thread from the start: once something hangs, it may be too late to begin one."""

    def __init__(self) -> None:
        super().__init__(name="last-resort", daemon=True)
        self._stops: queue.SimpleQueue[Stop] = queue.SimpleQueue()

    def begin(self, stop: Stop) -> None:
        """Callable in a signal handler."""
        self._stops.put(stop)

    def run(self) -> None:
        stop = self._stops.get()
        # Should some native code hold Python's lock, this thread does not run. This timer needs no lock.
        faulthandler.dump_traceback_later(stop.seconds + LOG_SECONDS, exit=True)
        time.sleep(stop.seconds)
        leave(stop.code, stop.kill, stop.loop)


def leave(
    code: int, kill: Callable[[], None] = lambda: None, loop: asyncio.AbstractEventLoop | None = None
) -> NoReturn:
    """End the process now, and say what it leaves behind: an orderly end would wait for threads that hang."""

    def tell() -> None:
        for one in left_behind(loop):
            log.warning("left behind: %s", one)
        logging.shutdown()

    telling = threading.Thread(target=tell, name="left-behind", daemon=True)
    telling.start()
    telling.join(LOG_SECONDS)
    kill()
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End the process at once, and its children."""
    for pid in child_processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(code)


def busy_threads(seconds: float) -> list[threading.Thread]:
    """The threads that would hold up the end of the process, once those that have nothing to do had time to end."""
    until = time.monotonic() + seconds
    threads = [each for each in threading.enumerate() if not each.daemon and each is not threading.current_thread()]
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


def left_behind(loop: asyncio.AbstractEventLoop | None = None) -> list[str]:
    """What runs or hangs: threads and where they are, child processes, and the tasks of the event loop."""
    frames = sys._current_frames()
    found = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or thread is threading.current_thread() or frame.f_code.co_filename.endswith(_IDLE):
            continue
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        found.append(f"the thread {thread.name}, in {frame.f_code.co_qualname} ({place})")
    found += [f"the process {pid}: {command}" for pid, command in child_processes().items()]
    tasks = asyncio.all_tasks(loop) if loop is not None else ()
    return [*found, *(f"the task {task.get_coro()!r}" for task in tasks)]


def child_processes() -> dict[int, str]:
    """The commands of this process's children, by process id. On Linux: elsewhere none are found, and children end
    when they find that nobody reads from them."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if int(parent) == os.getpid() and state in _RUNNING_CHILD:
            found[int(folder.name)] = command.strip()
    return found
