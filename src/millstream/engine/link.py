"""Links carry messages to an engine. `thread` is here; other kinds pass the same conformance tests."""

from __future__ import annotations

import threading
from typing import Protocol

from millstream.engine.backend import BackendFactory
from millstream.engine.mailbox import Mailbox
from millstream.engine.messages import Command
from millstream.engine.owner import OwnerLoop, SchedulerFactory, Sink


class Link(Protocol):
    def start_soon(self, sink: Sink) -> None:
        """Start the owner. Its events go to `sink`, on the owner's thread; the last one is `Stopped`."""
        ...

    def post_soon(self, command: Command) -> None:
        """Hand over a command. Raises `EngineGone` when the engine takes no more."""
        ...

    def join(self, timeout: float) -> bool:
        """Wait for the owner to be gone; true if it is. For the end of a server, never on the event loop."""
        ...


class ThreadLink:
    """Carries messages to an owner loop on a thread of this process."""

    def __init__(self, name: str, backend: BackendFactory, scheduler: SchedulerFactory) -> None:
        self._mailbox = Mailbox()
        self._name = name
        self._backend = backend
        self._scheduler = scheduler
        self._thread: threading.Thread | None = None

    def start_soon(self, sink: Sink) -> None:
        loop = OwnerLoop(self._mailbox, self._backend, self._scheduler, sink)
        # A daemon: an owner that hangs inside a native call must not keep the process from exiting.
        self._thread = threading.Thread(target=loop.run, name=f"engine-{self._name}", daemon=True)
        self._thread.start()

    def post_soon(self, command: Command) -> None:
        self._mailbox.post_soon(command)

    def join(self, timeout: float) -> bool:
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()
