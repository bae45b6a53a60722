"""A line at the bottom of a terminal that is rewritten in place, with the log above it."""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import threading
from typing import TextIO

_ERASE = "\r\x1b[2K"


class LiveLine(io.TextIOBase):
    """Wraps the stream of a terminal. What is written goes above the line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = ""
        self._lock = threading.Lock()

    def show(self, text: str) -> None:
        """Show this line instead of the last one; an empty one removes it."""
        width = shutil.get_terminal_size().columns - 1
        text = text if len(text) <= width else f"{text[: width - 1]}…"
        with self._lock:
            if text != self._text:
                self._text = text
                self._stream.write(f"{_ERASE}{text}")
                self._stream.flush()

    def write(self, text: str) -> int:
        with self._lock:
            self._stream.write(f"{_ERASE}{text}{self._text if text.endswith(chr(10)) else ''}" if self._text else text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def live_line(stream: TextIO | None = None) -> LiveLine | None:
    """The live line of the terminal that the log goes to. None if the log goes elsewhere, or leaves out progress."""
    stream = sys.stderr if stream is None else stream
    root = logging.getLogger()
    handlers = [
        handler for handler in root.handlers if isinstance(handler, logging.StreamHandler) and handler.stream is stream
    ]
    if not handlers or not stream.isatty() or os.environ.get("TERM") == "dumb" or not root.isEnabledFor(logging.INFO):
        return None
    line = LiveLine(stream)
    for handler in handlers:
        handler.setStream(line)
    return line
