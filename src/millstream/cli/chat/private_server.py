"""A server of the chat's own, in a child process on a free port. It ends with the chat."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import IO

from millstream.cli.served_models import BROKEN, ServedModel, list_models
from millstream.cli.server_client import KEY_VARIABLE, NoServer, ServerClient
from millstream.errors import ModelError

Report = Callable[[str], None]

POLL = 0.2
GRACE = 5.0
"""Seconds that the server has to end by itself."""

_COMMAND = [sys.executable, "-P", "-m", "millstream.cli.chat.private_child"]
_ADDRESS = re.compile(r"listening on (http://[\w.:\[\]]+)")
_TIME_AND_LEVEL = re.compile(r"^\d\d:\d\d:\d\d [EC] ")
_OWN = "MILLSTREAM_"
_KEPT = ("MILLSTREAM_CACHE", "MILLSTREAM_CACHE_DIR")
"""Variables of the user's servers that mean this one as well: where downloads are, not what is served and how."""


class PrivateServer:
    """A context manager. `model` is a folder, a file or a hub id; None for the demo model."""

    def __init__(self, model: str | None) -> None:
        self._model = model
        self._key = secrets.token_urlsafe(24)
        self._lines: deque[str] = deque(maxlen=200)
        self._address: str | None = None
        self._changed = threading.Event()

    def __enter__(self) -> PrivateServer:
        environment = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_OWN)}
        # No config file: the models that the user's own server has are not wanted here.
        # No calibration: it finds out how to batch many requests, and takes seconds.
        options = ["--host", "127.0.0.1", "--port", "0", "--no-config", "--disable", "calibration"]
        self._process = subprocess.Popen(
            [*_COMMAND, *([self._model] if self._model else []), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment | {KEY_VARIABLE: self._key},
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C ends an answer, not the server
        )
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stderr,), name="server-log")
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended: what is left are engines of the server
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._reader.join()

    def wait_ready(self, report: Report) -> tuple[ServerClient, ServedModel]:
        """Wait until the model is loaded. `report` is told what happens. Raises `ModelError` if it cannot be."""
        report("Starting a server")
        while self._address is None:
            self._require_running()
            self._changed.wait(POLL)
        client = ServerClient(self._address, self._key)
        while True:
            try:
                model = list_models(client)[0]
            except NoServer:  # it is ending, and its log says why once it has ended
                self._require_running()
                time.sleep(POLL)
                continue
            if model.state == "ready":
                return client, model
            if model.state in BROKEN:
                raise ModelError(model.error or f"{model.name} cannot be loaded.")
            report(loading(model))
            time.sleep(POLL)

    def _require_running(self) -> None:
        if self._process.poll() is None:
            return
        self._reader.join()
        errors = [_TIME_AND_LEVEL.sub("", line) for line in self._lines if _TIME_AND_LEVEL.match(line)]
        told = errors[:1] or [line.removeprefix("millstream: ") for line in self._lines][-1:]
        raise ModelError(told[0] if told else f"the server ended with status {self._process.returncode}")

    def _read(self, log: IO[str]) -> None:
        """On a thread of its own, so that the server never waits for someone to read its log."""
        with log:
            for line in log:
                self._lines.append(line.rstrip())
                if self._address is None and (found := _ADDRESS.search(line)):
                    self._address = found[1]
                    self._changed.set()
        self._changed.set()


def loading(model: ServedModel) -> str:
    """One line about a model that is being loaded."""
    progress = "" if model.progress is None else f" {model.progress:.0%}"
    return f"Loading {model.name}{progress}{f', {model.phase}' if model.phase else ''}"
