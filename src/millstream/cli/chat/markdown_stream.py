"""Render Markdown in the terminal while it arrives.

Blocks that are complete are printed for good and scroll away; only the block that still grows is drawn again, and of
it only as many lines as the screen has. Drawing all of a long answer again would leave copies behind in the history.
"""

from __future__ import annotations

import re
import time
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown, MarkdownElement
from rich.segment import Segment

INTERVAL = 0.08
"""Seconds between two drawings."""

_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """Text without control characters: a model must not send commands to the terminal."""
    return _CONTROL.sub("", text)


class _LeftHeading(Heading):
    """Where text begins, not in the middle of a wide terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Markdown(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = Markdown.elements | {"heading_open": _LeftHeading}


def markdown(text: str) -> Markdown:
    """HTML is shown as text, which is what it is here, and links show where they go."""
    rendered = _Markdown(text, code_theme="ansi_dark", hyperlinks=False)
    rendered.parsed = _PARSER.parse(text)
    return rendered


def last_block(text: str) -> int:
    """Where the last block begins, which may still grow: all before it is complete."""
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    lines = text.splitlines(keepends=True)
    return sum(len(line) for line in lines[: starts[-1]]) if starts else 0


class _Tail:
    """The end of a block that is higher than the screen."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(markdown(self._text), options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 1) :]:
            yield from line
            yield Segment.line()


class MarkdownStream:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        self._printed = False
        self._drawn = 0.0
        self._live: Live | None = None

    def feed(self, text: str) -> None:
        self._text += harmless(text)
        if time.monotonic() - self._drawn < INTERVAL:
            return
        if start := last_block(self._text):
            self._print(self._text[:start])
            self._text = self._text[start:]
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop", screen=False
            )
            self._live.start()
        self._live.update(_Tail(self._text), refresh=True)
        self._drawn = time.monotonic()

    def end(self) -> None:
        """Print what is left. More may be fed afterwards."""
        if self._text.strip():
            self._print(self._text)
        self._stop()
        self._text = ""

    def _print(self, text: str) -> None:
        self._stop()
        if self._printed:
            self._console.print()
        self._console.print(markdown(text))
        self._printed = True

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
