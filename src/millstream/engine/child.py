"""The other end of a process link: `python -m millstream.engine.child FD HEARTBEAT`. Its main thread is the owner."""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from millstream.engine.heartbeat import shared_heartbeat
from millstream.engine.messages import Event
from millstream.engine.owner import OwnerLoop
from millstream.engine.wire import frame, read_first
from millstream.engine.wire_mailbox import WireMailbox
from millstream.logs import configure_logs

COLLECT_AFTER = (20_000, 10, 10)
"""Thresholds of the garbage collector: with Python's own it would run in most steps of many rows."""
ORPHAN_SECONDS = 10.0
"""How long an engine without a parent may take to complete its step and free its model."""


def main(descriptor: int, heartbeat: int) -> None:
    # Ctrl-C, a service manager's SIGTERM and a closed terminal's SIGHUP reach the whole group; the parent alone decides
    # when an engine ends.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    end = socket.socket(fileno=descriptor)
    backend, scheduler, (level, form) = read_first(end)
    configure_logs(level, form)
    threading.Thread(target=_exit_as_orphan, args=(end,), name="orphan", daemon=True).start()

    def emit(events: Sequence[Event]) -> None:
        try:
            end.sendall(frame(events))
        except OSError:
            logging.getLogger(__name__).debug("the parent is gone")

    gc.set_threshold(*COLLECT_AFTER)
    OwnerLoop(WireMailbox(end), backend, scheduler, emit, shared_heartbeat(heartbeat)).run()


def _exit_as_orphan(end: socket.socket) -> None:
    """Sleeps until the parent is gone. The owner then finds the end of its mail and stops; exit even if it hangs."""
    hang_up = select.poll()
    hang_up.register(end, 0)
    hang_up.poll()
    threading.Event().wait(ORPHAN_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
