"""Where everything is, for tests in which something does not end."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback

from millstream.last_resort import left_behind


def whereabouts(loop: asyncio.AbstractEventLoop | None = None) -> str:
    """The stacks of all threads and of all tasks of an event loop, and the child processes."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    told = []
    for ident, frame in sys._current_frames().items():
        told += [f"\nthread {names.get(ident, ident)}\n", *traceback.format_stack(frame)]
    for task in asyncio.all_tasks(loop) if loop is not None else ():
        told += [f"\ntask {task!r}\n", *(f"  {frame}\n" for frame in task.get_stack())]
    return "".join([*told, "\n", "\n".join(left_behind(loop))])
