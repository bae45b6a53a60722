"""SIGHUP: read the configuration again and change the models, while requests run.

A terminal that closes sends the same signal. Then the server ends, as it would without this module, unless it was
started to outlive its terminal (nohup).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from millstream.compose import Mill
from millstream.config import ConfigUpdate
from millstream.errors import MillstreamError

log = logging.getLogger(__name__)

Reread = Callable[[], ConfigUpdate]
"""Reads the configuration again; blocks. Raises a `MillstreamError` if it cannot be used."""


class ConfigReloader:
    """One reload at a time. A signal that comes meanwhile starts another one afterwards."""

    def __init__(self, mill: Mill, reread: Reread, pool: Executor, *, hang_up: Callable[[], None]) -> None:
        """`pool` runs `reread`; `hang_up` is called when the server's terminal has closed."""
        self._mill = mill
        self._reread = reread
        self._pool = pool
        self._hang_up = hang_up
        self._task: asyncio.Task[None] | None = None
        self._again = False

    @contextmanager
    def on_signal(self) -> Iterator[None]:
        """Inside the block, SIGHUP reloads. Only the main thread can receive signals."""
        if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
            yield
            return
        outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        had_terminal = _has_terminal()

        def receive() -> None:
            if had_terminal and not outlives_terminal and not _has_terminal():
                log.info("the terminal has closed")
                self._hang_up()
            else:
                self.reload_soon()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, receive)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            if outlives_terminal:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def reload_soon(self) -> None:
        self._again = True
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
            self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        while self._again:
            self._again = False
            log.info("reading the configuration again")
            try:
                await self._mill.reload(await asyncio.wrap_future(self._pool.submit(self._reread)))
            except MillstreamError as error:
                log.error("the configuration was not reloaded, and nothing has changed: %s", error.message)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the configuration could not be reloaded", exc_info=error)


def _has_terminal() -> bool:
    """True if the process has a controlling terminal that is still open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
