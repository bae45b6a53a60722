"""A gate that can hold a backend in another process: two named pipes, and files for orders."""

from __future__ import annotations

import os
import select
from pathlib import Path

TIMEOUT = 30
MANY = b"." * 4000


class FifoGate:
    """The test's side of the gate. `remote` is the backend's side, and can be pickled for a child process."""

    def __init__(self, folder: Path) -> None:
        self.remote = RemoteGate(folder)
        folder.mkdir(parents=True)
        for path in (self.remote.entered, self.remote.go):
            os.mkfifo(path)
        # Opened for reading and writing, so that neither side waits for the other to open.
        self._entered = os.open(self.remote.entered, os.O_RDWR)
        self._go = os.open(self.remote.go, os.O_RDWR)

    def wait_entered(self) -> None:
        ready, _, _ = select.select([self._entered], [], [], TIMEOUT)
        assert ready, "the backend was never called"
        os.read(self._entered, 1)

    def let_one(self) -> None:
        os.write(self._go, b".")

    def open(self) -> None:
        self.remote.opened.touch()
        os.write(self._go, MANY)

    def fail_next(self, message: str) -> None:
        self.remote.order.write_text(message)

    def close(self) -> None:
        os.close(self._entered)
        os.close(self._go)


class RemoteGate:
    """The backend's side of the gate."""

    def __init__(self, folder: Path) -> None:
        self.entered, self.go = folder / "entered", folder / "go"
        self.opened, self.order = folder / "opened", folder / "fail"

    def pass_through(self) -> None:
        if not self.opened.exists():
            self._announce_and_wait()
        if self.order.exists():
            message = self.order.read_text()
            self.order.unlink()
            raise ValueError(message)

    def _announce_and_wait(self) -> None:
        entered, go = os.open(self.entered, os.O_WRONLY), os.open(self.go, os.O_RDONLY)
        try:
            os.write(entered, b".")
            os.read(go, 1)
        finally:
            os.close(entered)
            os.close(go)
