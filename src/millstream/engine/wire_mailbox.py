"""The mailbox of an engine in a process of its own: the owner reads the server's commands by itself.

So no other thread of the process runs Python while the owner builds a step.
"""

from __future__ import annotations

import select
import socket

from millstream.engine.mailbox import Mailbox
from millstream.engine.messages import Command, Shutdown
from millstream.engine.wire import FrameReader

GONE = "the server is gone"


class WireMailbox(Mailbox):
    """`take`, `shutdown_reason` and `close` are for the owner alone. The engine's other threads post as ever."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__()
        self._end = end
        self._reader: FrameReader | None = FrameReader(end)
        """None once the server is gone."""
        self._waker, self._woken = socket.socketpair()
        self._waits = False

    def take(self, *, timeout: float = 0.0) -> list[Command]:
        self._receive()
        if timeout:
            with self._changed:
                self._waits = wait = not self._commands
            if wait:
                self._wait(timeout)
        return super().take()

    def shutdown_reason(self) -> str | None:
        self._receive()
        return super().shutdown_reason()

    def close(self, reason: str) -> list[Command]:
        self._receive()
        left = super().close(reason)  # from now on nobody posts, so nobody wakes
        self._waker.close()
        self._woken.close()
        return left

    def _posted(self) -> None:
        if self._waits:
            self._waits = False
            self._waker.send(b"\0")

    def _wait(self, timeout: float) -> None:
        """Until a command comes, from the server or from a thread."""
        ends = [self._woken, *([self._end] if self._reader is not None else [])]
        ready, _, _ = select.select(ends, [], [], timeout)
        with self._changed:
            self._waits = False
            if self._woken in ready:
                self._woken.recv(1)
        self._receive()

    def _receive(self) -> None:
        """Take over all commands that have come from the server."""
        if self._reader is None:
            return
        try:
            while (commands := self._reader.read()) is not None:
                self._add(commands)
        except (EOFError, OSError):
            self._reader = None
            self._add([Shutdown(GONE)])

    def _add(self, commands: list[Command]) -> None:
        with self._changed:
            self._commands += commands
