"""The mailbox of an engine: a queue of commands that any thread posts to, the owner drains, and that can be closed."""

from __future__ import annotations

import threading

from millstream.engine.messages import Command, Shutdown
from millstream.errors import EngineGone


class Mailbox:
    """A posted command either reaches the owner for certain, or the post raises `EngineGone`.

    `close` is atomic with respect to `post_soon`: it returns the commands that were posted before it, and every later
    post raises. So no command is lost between the last `take` and the end.
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
            self._posted()

    def post_last(self, command: Shutdown) -> None:
        """Post a command and close the mailbox in one step: the owner takes it, and every later post raises."""
        with self._changed:
            if self._closed is not None:
                raise EngineGone(self._closed)
            self._commands.append(command)
            self._closed = command.reason
            self._posted()

    def _posted(self) -> None:
        """Wake the owner if it waits. Called with the lock held."""
        self._changed.notify()

    def take(self, *, timeout: float = 0.0) -> list[Command]:
        """Take all commands, oldest first. Waits at most `timeout` seconds if there is none."""
        with self._changed:
            if timeout and not self._commands:
                self._changed.wait(timeout)
            commands, self._commands = self._commands, []
            return commands

    def shutdown_reason(self) -> str | None:
        """Why the engine is asked to stop, if a `Shutdown` waits. For an owner that is busy and looks now and then."""
        with self._changed:
            return next((command.reason for command in self._commands if isinstance(command, Shutdown)), None)

    def close(self, reason: str) -> list[Command]:
        """Make later posts raise with `reason`; returns the commands that were not taken."""
        with self._changed:
            self._closed = reason
            commands, self._commands = self._commands, []
            return commands
