"""The line on which a person types: history, several lines, completion of `/` commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter, WordCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from millstream.cli.chat.settings import SETTINGS
from millstream.cli.chat.slash import COMMANDS

QUOTES = '"""'
_PATHS = ("image", "save", "load")


def state_folder() -> Path:
    """Where programs keep what is neither configuration nor cache."""
    if xdg := os.environ.get("XDG_STATE_HOME"):
        return Path(xdg).expanduser() / "millstream"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "millstream"
    return Path.home() / ".local" / "state" / "millstream"


def open_history(folder: Path) -> History:
    """For the user's eyes only. Kept in memory if the folder cannot be written."""
    file = folder / "chat-history"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))


def is_open(text: str) -> bool:
    """Whether a text in triple quotes still lacks its end."""
    text = text.strip()
    return text.startswith(QUOTES) and not (len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES))


def without_quotes(text: str) -> str:
    text = text.strip()
    return text[len(QUOTES) : -len(QUOTES)].strip() if text.startswith(QUOTES) and not is_open(text) else text


class SlashCompleter(Completer):
    """Commands, and what may follow each."""

    def __init__(self, models: Callable[[], list[str]]) -> None:
        self._commands = WordCompleter([f"/{name}" for name in COMMANDS], sentence=True)
        self._values = {
            "model": WordCompleter(models, sentence=True),
            "set": WordCompleter(list(SETTINGS), sentence=True),
        }
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        command, space, rest = text[1:].partition(" ")
        if not space:
            yield from self._commands.get_completions(document, event)
        elif command in _PATHS:
            yield from self._paths.get_completions(Document(rest), event)
        elif command in self._values:
            yield from self._values[command].get_completions(Document(rest), event)


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    return bindings


class PromptLine:
    def __init__(self, models: Callable[[], list[str]], folder: Path | None = None) -> None:
        self._session: PromptSession[str] = PromptSession(
            message=">>> ",
            history=open_history(state_folder() if folder is None else folder),
            multiline=True,
            prompt_continuation="... ",
            key_bindings=_bindings(),
            completer=SlashCompleter(models),
            complete_while_typing=False,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the line was empty when it was last left, by Ctrl-C for example."""
        return not self._session.default_buffer.text.strip()

    def read(self) -> str:
        """Raises `EOFError` for Ctrl-D and `KeyboardInterrupt` for Ctrl-C."""
        return without_quotes(self._session.prompt())
