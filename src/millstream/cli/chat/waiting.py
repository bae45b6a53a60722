"""Say what happens while a person waits: a spinner with a line of text, in a terminal only."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from millstream.cli.chat.private_server import loading
from millstream.cli.served_models import find, list_models
from millstream.cli.server_client import ServerClient
from millstream.errors import MillstreamError

POLL = 0.5


class Waiting:
    """A context manager. `say` replaces the text; `stop` may be called early, and more than once."""

    def __init__(self, console: Console | None, text: str) -> None:
        self._status = Status(text, console=console, spinner="dots") if console is not None else None

    def __enter__(self) -> Waiting:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def say(self, text: str) -> None:
        if self._status is not None:
            self._status.update(f"{escape(text)} …")

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()


class LoadWatcher:
    """While an answer has not begun, shows how far its model is loaded. A context manager."""

    def __init__(self, waiting: Waiting, client: ServerClient, model: str) -> None:
        self._waiting = waiting
        self._client = client
        self._model = model
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="load-watcher", daemon=True)

    def __enter__(self) -> LoadWatcher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()

    def stop(self) -> None:
        self._done.set()
        self._waiting.stop()

    def _watch(self) -> None:
        while not self._done.wait(POLL):
            try:
                model = find(list_models(self._client), self._model)
            except MillstreamError:
                return  # the request itself will say it
            if model is None or model.state == "ready":
                self._waiting.say("Waiting for the first word")
            else:
                self._waiting.say(loading(model))
