"""A whole server in a thread of the test: real sockets, real uvicorn, any backend."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from millstream.config import Settings
from millstream.loading.backends import BackendMaker, generation_backend
from millstream.server import MillServer, bind, serve_on
from support.stacks import whereabouts

PATIENCE = 60


class RunningServer:
    """`url` is its address; `stop` is what SIGTERM does."""

    def __init__(self, settings: Settings, make_backend: BackendMaker) -> None:
        self._listener = bind(settings)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.outcome: tuple[int, bool] | None = None
        self._settings = settings
        self._make_backend = make_backend
        self._started = threading.Event()
        self._server: MillServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="server")
        self._thread.start()
        assert self._started.wait(PATIENCE)

    def call(self, work: Callable[[MillServer], Any], patience: float = PATIENCE) -> Any:
        """Run `work` on the server's event loop and return its result."""
        assert self._server is not None
        assert self._loop is not None
        server = self._server

        async def run() -> Any:
            result = work(server)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(patience)

    def wait_ready(self) -> None:
        assert self.call(lambda server: server.mill.hub.settled())

    def stop_soon(self) -> None:
        assert self._server is not None
        self._server.should_exit = True

    def join(self) -> tuple[int, bool]:
        self._thread.join(PATIENCE)
        assert self.outcome is not None, f"the server did not stop:\n{whereabouts(self._loop)}"
        return self.outcome

    def _run(self) -> None:
        with self._listener:
            self.outcome = asyncio.run(
                serve_on(self._listener, self._settings, make_backend=self._make_backend, on_start=self._note)
            )

    def _note(self, server: MillServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._started.set()


@contextmanager
def running(settings: Settings, make_backend: BackendMaker = generation_backend) -> Iterator[RunningServer]:
    if make_backend is not generation_backend and settings.isolation == "auto":
        # it holds the test's own objects, so it cannot leave this process
        settings = dataclasses.replace(settings, isolation="thread")
    server = RunningServer(settings, make_backend)
    try:
        server.wait_ready()
        yield server
    finally:
        if server.outcome is None:
            server.stop_soon()
            server.join()
