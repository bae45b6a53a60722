"""Links carry messages to an engine. `thread` is here; other kinds pass the same conformance tests."""

from __future__ import annotations

import os
import threading
from typing import Protocol

from millstream.engine.backend import BackendFactory
from millstream.engine.mailbox import Mailbox
from millstream.engine.messages import Command, Shutdown
from millstream.engine.owner import OwnerLoop, SchedulerFactory, Sink
from millstream.engine.pulse import Pulse
from millstream.errors import EngineGone


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

    def disown(self, reason: str) -> None:
        """Take no more, and end the owner as far as that is possible while it hangs. Does not wait."""
        ...

    def age(self) -> float:
        """Seconds that the step under way has taken; 0 between steps."""
        ...

    def where(self) -> tuple[int | None, int | None]:
        """The owner's process and its thread, by the numbers that the system's tools show."""
        ...


class ThreadLink:
    """Carries messages to an owner loop on a thread of this process."""

    def __init__(self, name: str, backend: BackendFactory, scheduler: SchedulerFactory) -> None:
        self._mailbox = Mailbox()
        self._name = name
        self._backend = backend
        self._scheduler = scheduler
        self._thread: threading.Thread | None = None
        self._pulse = Pulse()

    def start_soon(self, sink: Sink) -> None:
        loop = OwnerLoop(self._mailbox, self._backend, self._scheduler, sink, self._pulse)
        # A daemon: an owner that hangs inside a native call must not keep the process from exiting.
        self._thread = threading.Thread(target=loop.run, name=f"engine-{self._name}", daemon=True)
        self._thread.start()

    def post_soon(self, command: Command) -> None:
        self._mailbox.post_soon(command)

    def join(self, timeout: float) -> bool:
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def disown(self, reason: str) -> None:
        """A thread cannot be ended from outside: should its step return one day, it frees its model and goes."""
        try:
            self._mailbox.post_last(Shutdown(reason))
        except EngineGone:
            return

    def age(self) -> float:
        return self._pulse.age()

    def where(self) -> tuple[int | None, int | None]:
        alive = self._thread is not None and self._thread.is_alive()
        return os.getpid(), self._thread.native_id if alive and self._thread is not None else None
