"""A command in a pseudo-terminal of its own, as a person would use it: Ctrl-C and all."""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

PATIENCE = 60
CTRL_C, CTRL_D, ALT_ENTER, UP = "\x03", "\x04", "\x1b\r", "\x1b[A"

# The terminal must be the session's own for Ctrl-C to become a signal. A fork of this process, which has threads, would
# not do.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_=>])")


class Terminal:
    """`wait_for` finds texts in the order in which they appear, without colours and cursor movements."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], rows: int, columns: int) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-IS", "-c", _TAKE_TERMINAL, *command],
            stdin=slave, stdout=slave, stderr=slave, env=dict(environment), start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.raw = ""
        self._seen = 0
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="terminal")
        self._reader.start()

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, wanted: str) -> str:
        """Returns what came before it, since the last match."""
        with self._changed:
            self._changed.wait_for(lambda: wanted in self.text[self._seen :] or self._ended, PATIENCE)
            rest = self.text[self._seen :]
            assert wanted in rest, f"{wanted!r} did not appear in:\n{rest}"
            place = rest.index(wanted)
            self._seen += place + len(wanted)
            return rest[:place]

    def wait_exit(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait_exit()
        os.close(self._master)

    def _read(self) -> None:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # how Linux says that nobody writes any more
                data = b""
            with self._changed:
                self.raw += decode(data)
                self._ended = not data
                self._changed.notify_all()
                if self._ended:
                    return


@contextmanager
def terminal(*arguments: str, environment: Mapping[str, str], rows: int = 40, columns: int = 100) -> Iterator[Terminal]:
    """`millstream ARGUMENTS` in a terminal. prompt_toolkit must not ask where the cursor is: nobody answers here."""
    command = [sys.executable, "-P", "-m", "millstream", *arguments]
    more = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
    opened = Terminal(command, {**environment, **more}, rows, columns)
    try:
        yield opened
    finally:
        opened.close()
