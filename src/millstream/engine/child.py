"""The other end of a process link: `python -m millstream.engine.child FD HEARTBEAT`. Its main thread is the owner."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from millstream.engine.heartbeat import shared_heartbeat
from millstream.engine.mailbox import Mailbox
from millstream.engine.messages import Event, Shutdown
from millstream.engine.owner import OwnerLoop
from millstream.errors import EngineGone
from millstream.logs import configure_logs

ORPHAN_SECONDS = 10.0
"""How long an engine without a parent may take to complete its step and free its model."""


def main(descriptor: int, heartbeat: int) -> None:
    # Ctrl-C, a service manager's SIGTERM and a closed terminal's SIGHUP reach the whole group; the parent alone decides
    # when an engine ends.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    connection = Connection(descriptor)
    backend, scheduler, (level, form) = pickle.loads(connection.recv_bytes())
    configure_logs(level, form)
    mailbox = Mailbox()
    threading.Thread(target=_read, args=(connection, mailbox), name="commands", daemon=True).start()

    def emit(events: Sequence[Event]) -> None:
        try:
            connection.send_bytes(pickle.dumps(events, pickle.HIGHEST_PROTOCOL))
        except OSError:
            logging.getLogger(__name__).debug("the parent is gone")

    OwnerLoop(mailbox, backend, scheduler, emit, shared_heartbeat(heartbeat)).run()


def _read(connection: Connection, mailbox: Mailbox) -> None:
    try:
        while True:
            mailbox.post_soon(pickle.loads(connection.recv_bytes()))
    except EngineGone:
        return  # the owner is ending; later commands are not needed
    except (EOFError, OSError):
        _orphaned(mailbox)


def _orphaned(mailbox: Mailbox) -> None:
    """The parent is gone: shut down, and exit even if the owner hangs in a step."""
    try:
        mailbox.post_soon(Shutdown("the server is gone"))
    except EngineGone:
        return
    threading.Event().wait(ORPHAN_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
