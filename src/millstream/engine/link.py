"""Links carry messages to an engine: the protocol, and the link to a thread. See `process_link` for a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from millstream.engine.heartbeat import Beat, Heartbeat
from millstream.engine.mailbox import Mailbox
from millstream.engine.messages import Command, Shutdown
from millstream.engine.owner import OwnerLoop, Sink
from millstream.engine.owner_threads import OwnerThreads, Run
from millstream.engine.protocols import BackendFactory, SchedulerFactory
from millstream.errors import EngineGone


class Poller(Protocol):
    """Calls back when a file can be read. An event loop is one."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *arguments: Any) -> None: ...

    def remove_reader(self, fd: Any) -> Any: ...


class Link(Protocol):
    def start_soon(self, sink: Sink, poller: Poller | None = None) -> None:
        """Start the owner. Its events go to `sink`; the last one is `Stopped`. `sink` is called on any thread, or by
        the `poller`, if the link has a file to poll."""
        ...

    def post_soon(self, command: Command) -> None:
        """Post a command. Raises `EngineGone` if the engine accepts no more."""
        ...

    def join(self, timeout: float) -> bool:
        """Wait until the owner is gone; returns True if it is. Never called on the event loop."""
        ...

    def disown(self, reason: str) -> None:
        """Accept no more commands, and end a hanging owner as far as possible. Does not wait."""
        ...

    def kill(self, reason: str) -> None:
        """End a process at once. Does nothing to a thread. Does not wait."""
        ...

    def heartbeat(self) -> Beat:
        """The owner's last heartbeat."""
        ...

    def stopped(self) -> bool:
        """True if a signal or a debugger has stopped the owner's process, as far as the system tells."""
        ...

    def where(self) -> tuple[int | None, int | None]:
        """The ids of the owner's process and thread, as system tools show them."""
        ...


class ThreadLink:
    """Carries messages to an owner loop on a thread of this process."""

    def __init__(
        self, name: str, backend: BackendFactory, scheduler: SchedulerFactory, threads: OwnerThreads | None = None
    ) -> None:
        """`threads` are shared with other links; without them, the thread ends with its engine."""
        self._mailbox = Mailbox()
        self._name = name
        self._backend = backend
        self._scheduler = scheduler
        self._threads = OwnerThreads(reuse=False) if threads is None else threads
        self._run: Run | None = None
        self._heartbeat = Heartbeat()

    def start_soon(self, sink: Sink, poller: Poller | None = None) -> None:
        """`sink` is called on the owner's thread."""
        loop = OwnerLoop(self._mailbox, self._backend, self._scheduler, sink, self._heartbeat)
        self._run = self._threads.start(self._name, loop.run)

    def post_soon(self, command: Command) -> None:
        self._mailbox.post_soon(command)

    def join(self, timeout: float) -> bool:
        return self._run is None or self._run.join(timeout)

    def disown(self, reason: str) -> None:
        """A thread cannot be ended from outside: if its step returns, it frees its model and stops."""
        if self._run is not None:
            self._run.disowned = True
        try:
            self._mailbox.post_last(Shutdown(reason))
        except EngineGone:
            return

    def kill(self, reason: str) -> None:
        """A thread cannot be killed: it ends when its load returns."""

    def heartbeat(self) -> Beat:
        return self._heartbeat.read()

    def stopped(self) -> bool:
        return False

    def where(self) -> tuple[int | None, int | None]:
        return os.getpid(), None if self._run is None else self._run.native_id
