"""Runs the composed server: the socket, the event loop, the signals, and the order in which all of it ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import uvicorn

from millstream import __version__
from millstream.api.app import DEFAULT_DIALECT, create_app
from millstream.api.hosts import names_to_check
from millstream.api.http1.connections import Connections
from millstream.api.http1.limits import HttpLimits
from millstream.api.http1.protocol import LimitedProtocol
from millstream.backend.open_files import open_files, raise_open_files
from millstream.compose import BackendMaker, Mill, text_backend
from millstream.config import Settings
from millstream.errors import ModelError

log = logging.getLogger(__name__)

POOL_THREADS = 4
NETWORK_THREADS = 16
"""Fetches of images that may be under way at once, and look-ups of names."""
STOPPING = "the server is shutting down"


def serve(settings: Settings) -> tuple[int, bool]:
    """Serve until a signal or a fatal error. Returns the exit code, and whether everything inside has ended."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    raise_open_files()
    with bind(settings) as listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        warn_if_open(listener, settings)
        return runner.run(serve_on(listener, settings))


def bind(settings: Settings) -> socket.socket:
    """Take the port before anything is loaded: a taken one should not cost a minute."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise ModelError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}. "
            "Another server may run there; choose a port with --port."
        ) from error


def warn_if_open(listener: socket.socket, settings: Settings) -> None:
    """Looks at the address that was bound: a name such as `localhost` is resolved by then."""
    address = listener.getsockname()[0]
    if not settings.api_keys and not ipaddress.ip_address(address).is_loopback:
        log.warning("anyone who can reach %s can use the models: there is no API key. --api-key closes it", address)


async def serve_on(
    listener: socket.socket,
    settings: Settings,
    *,
    make_backend: BackendMaker = text_backend,
    on_start: Callable[[MillServer], None] = lambda _: None,
) -> tuple[int, bool]:
    """Serve on a bound socket until the server is told to exit. `on_start` gets hold of it, for whoever tells it."""
    pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="prepare")
    network = ThreadPoolExecutor(NETWORK_THREADS, thread_name_prefix="fetch")
    names = ThreadPoolExecutor(NETWORK_THREADS, thread_name_prefix="names")
    mill = Mill(settings, pool, network, names, make_backend)
    app = create_app(
        mill.service,
        body_limit=settings.body_limit,
        write_timeout=settings.write_timeout,
        api_keys=settings.api_keys,
        cors_origins=settings.cors_origins,
        hosts=names_to_check(listener.getsockname()[0], settings.allowed_hosts),
    )
    server = MillServer(app, mill, settings)
    for spec in settings.specs:
        mill.add(spec)
    on_start(server)
    watcher = asyncio.create_task(_watch(mill, server, listener))
    await server.serve(sockets=[listener])
    watcher.cancel()
    for threads in (pool, network, names):
        threads.shutdown(wait=False, cancel_futures=True)
    return server.exit_code, server.freed


async def _watch(mill: Mill, server: MillServer, listener: socket.socket) -> None:
    """Say where to reach the server once a model answers; give up when none will."""
    host, port = listener.getsockname()[:2]
    log.info("Millstream %s listens on http://%s:%d", __version__, f"[{host}]" if ":" in host else host, port)
    ready = await mill.hub.settled()
    if not ready:
        log.error("no model could be loaded")
        server.exit_code = 1
        server.should_exit = True
        return
    # What is here now stays: the collector need not look at it again and again, 20 ms and more each time.
    gc.collect()
    gc.freeze()
    lazy = [card.name for card in mill.hub.cards() if card.state == "unloaded"]
    text = ", ".join(name for name in ready if name not in lazy) or "no model yet"
    text += f" ({', '.join(lazy)} when used)" if lazy else ""
    log.info("ready: %s. The API is at http://%s:%d/v1, its description at /docs", text, host, port)


def http_protocol(settings: Settings) -> Callable[..., LimitedProtocol]:
    """What uvicorn makes of every connection. All of them share the limits."""
    limits = HttpLimits(
        header_seconds=settings.header_timeout,
        body_seconds=settings.body_timeout,
        connections=settings.max_connections,
    )
    connections = Connections(limits, open_files=open_files)
    if connections.cap < settings.max_connections:
        log.warning(
            "at most %d connections instead of --max-connections %d: this process may open %s files (ulimit -n)",
            connections.cap, settings.max_connections, open_files(),
        )  # fmt: skip
    return functools.partial(
        LimitedProtocol, limits=limits, connections=connections, error_format=DEFAULT_DIALECT.errors
    )


class MillServer(uvicorn.Server):
    """uvicorn, ended in our order: no new requests, then the engines drain, then the connections close."""

    def __init__(self, app: object, mill: Mill, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=http_protocol(settings),  # type: ignore[arg-type]
                ws="none",
                # Fixed here, not by the environment: a peer that is believed to be local may use the admin routes.
                forwarded_allow_ips="127.0.0.1,::1,::ffff:127.0.0.1",
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=int(settings.grace + 5),
            )
        )
        self.mill = mill
        self.exit_code = 0
        self.freed = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("shutting down: running requests have a moment to finish")
        draining = asyncio.create_task(self.mill.close(STOPPING))
        await super().shutdown(sockets)
        self.freed = await draining
        log.info("stopped" if self.freed else "stopped; an engine still hangs in a step and was left behind")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets running requests finish, the second ends all of it now."""
        if not self.should_exit:
            self.should_exit = True
            return
        log.warning("a second signal: ending now")
        self.mill.kill(STOPPING)
        logging.shutdown()
        os._exit(128 + sig)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT mean a clean end, and a clean end is exit code 0. A second one ends the waiting."""
        if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
            with super().capture_signals():
                yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.Loop
