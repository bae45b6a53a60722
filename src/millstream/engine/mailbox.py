"""The one way into an engine: a closable queue that any thread may post to and the owner drains whole."""

from __future__ import annotations

import threading

from millstream.engine.messages import Command, Shutdown
from millstream.errors import EngineGone


class Mailbox:
    """Posting either puts the command where the owner is certain to take it, or raises: never neither.

    `close` is atomic with respect to `post_soon`: whatever was posted before it is returned by it, and
    everything after it raises in the poster. So a command cannot fall between the last drain and the end.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._commands: list[Command] = []
        self._closed: str | None = None

    def post_soon(self, command: Command) -> None:
        with self._changed:
            if self._closed is not None:
                raise EngineGone(self._closed)
            self._commands.append(command)
            self._changed.notify()

    def post_last(self, command: Shutdown) -> None:
        """Post and close in one act: the owner takes what is here, and whoever comes later is refused."""
        with self._changed:
            if self._closed is not None:
                raise EngineGone(self._closed)
            self._commands.append(command)
            self._closed = command.reason
            self._changed.notify()

    def take(self, *, wait: float = 0.0) -> list[Command]:
        """All commands in the order they came. Waits at most `wait` seconds for the first."""
        with self._changed:
            if wait and not self._commands:
                self._changed.wait(wait)
            commands, self._commands = self._commands, []
            return commands

    def close(self, reason: str) -> list[Command]:
        """Refuse what comes from now on with `reason`, and hand over what is still here."""
        with self._changed:
            self._closed = reason
            commands, self._commands = self._commands, []
            return commands
