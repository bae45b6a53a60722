"""Where an answer goes: rendered in a terminal, plain everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.text import Text

from millstream.cli.chat.markdown_stream import MarkdownStream, harmless


class PlainDisplay:
    """Writes the answer as it is, and no reasoning."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = "\n"

    def reasoning(self, text: str) -> None:
        pass

    def content(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
        self._last = text

    def end(self) -> None:
        if not self._last.endswith("\n"):
            self._out.write("\n")
        self._out.flush()


class TerminalDisplay:
    """Markdown, with the reasoning dimmed before it. `on_first` is called before anything is shown."""

    def __init__(self, console: Console, on_first: Callable[[], None] = lambda: None) -> None:
        self._console = console
        self._on_first = on_first
        self._stream = MarkdownStream(console)
        self._started = False
        self._reasoning = False

    def reasoning(self, text: str) -> None:
        self._start()
        if not self._reasoning:
            self._stream.end()
            text = text.lstrip("\n")
        self._reasoning = True
        self._console.print(Text(harmless(text), style="dim"), end="", soft_wrap=True, highlight=False)

    def content(self, text: str) -> None:
        self._start()
        self._close_reasoning()
        self._stream.feed(text)

    def end(self) -> None:
        self._start()
        self._close_reasoning()
        self._stream.end()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._on_first()

    def _close_reasoning(self) -> None:
        if self._reasoning:
            self._console.print("\n")
            self._reasoning = False
