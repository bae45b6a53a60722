"""A gate that also holds a backend in another process: two pipes with names, and files for orders."""

from __future__ import annotations

import os
import select
from pathlib import Path

PATIENCE = 30
MANY = b"." * 4000


class FifoGate:
    """The test's end. `far` is the backend's, and crosses to a child."""

    def __init__(self, folder: Path) -> None:
        self.far = FarEnd(folder)
        folder.mkdir(parents=True)
        for path in (self.far.entered, self.far.go):
            os.mkfifo(path)
        # Open for both, so that neither end ever waits for the other to open.
        self._entered = os.open(self.far.entered, os.O_RDWR)
        self._go = os.open(self.far.go, os.O_RDWR)

    def wait_entered(self) -> None:
        ready, _, _ = select.select([self._entered], [], [], PATIENCE)
        assert ready, "the backend was never asked for a step"
        os.read(self._entered, 1)

    def let_one(self) -> None:
        os.write(self._go, b".")

    def open(self) -> None:
        self.far.opened.touch()
        os.write(self._go, MANY)

    def fail_next(self, message: str) -> None:
        self.far.order.write_text(message)

    def close(self) -> None:
        os.close(self._entered)
        os.close(self._go)


class FarEnd:
    def __init__(self, folder: Path) -> None:
        self.entered, self.go = folder / "entered", folder / "go"
        self.opened, self.order = folder / "opened", folder / "fail"

    def pass_through(self) -> None:
        if not self.opened.exists():
            self._say_and_wait()
        if self.order.exists():
            message = self.order.read_text()
            self.order.unlink()
            raise ValueError(message)

    def _say_and_wait(self) -> None:
        out, back = os.open(self.entered, os.O_WRONLY), os.open(self.go, os.O_RDONLY)
        try:
            os.write(out, b".")
            os.read(back, 1)
        finally:
            os.close(out)
            os.close(back)
