"""Runs a command as a process and reads what it says, line by line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import millstream

PATIENCE = 120


class Command:
    """`python -m MODULE ARGUMENTS`, with output and errors in one stream."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        places = [str(Path(__file__).parents[1]), str(Path(millstream.__file__).parents[1])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places), **(environment or {})},
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_line(self, pattern: str) -> re.Match[str]:
        with self._changed:
            self._changed.wait_for(lambda: self._find(pattern) or not self._reader.is_alive(), PATIENCE)
        found = self._find(pattern)
        assert found is not None, f"{pattern!r} is not in:\n{self.text}"
        return found

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        code = self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _find(self, pattern: str) -> re.Match[str] | None:
        return next((match for line in list(self.lines) if (match := re.search(pattern, line))), None)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()
