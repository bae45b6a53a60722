"""Run the server: socket, event loop, signals and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import ipaddress
import logging
import math
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from types import FrameType

import uvicorn

from millstream import __version__
from millstream.api.app import DEFAULT_DIALECT, create_app, is_websocket
from millstream.api.background import BackgroundTasks
from millstream.api.edge import STOPPING
from millstream.api.hosts import names_to_check
from millstream.api.http1.connections import Connections
from millstream.api.http1.limits import HttpLimits
from millstream.api.http1.protocol import LimitedProtocol
from millstream.api.http1.websocket import MAX_MESSAGE, PING_SECONDS
from millstream.api.pages.assets import read_assets
from millstream.backend.open_files import open_files, raise_open_files
from millstream.compose import Mill, ended_by
from millstream.config import Settings
from millstream.deadline import Deadline
from millstream.errors import ModelError
from millstream.last_resort import LastResort, Stop, busy_threads, end_process
from millstream.loading.backends import BackendMaker, generation_backend
from millstream.loading.progress import LoadWatch, Show
from millstream.pools import Pools
from millstream.reload import ConfigReloader, Reread
from millstream.service.turnstile import enter_new

log = logging.getLogger(__name__)

# A stop takes the grace time and at most ten seconds more, whatever hangs. These are seconds after the grace time.
REQUEST_SECONDS = 2.0
"""Then the requests are cancelled that have not ended with their engines, with an error to their clients."""
CLOSE_SECONDS = 7.0
"""Then what is not closed is left behind."""
LAST_RESORT_SECONDS = 9.0
"""Then the process is ended, if it still runs."""

LAST_EVENT_SECONDS = 1.0
"""For the errors of cancelled requests to be sent."""
THREAD_SECONDS = 1.5
"""For threads to complete what they do, such as writing to the store."""
COLLECT_AFTER = (50_000, 10, 10)
"""Thresholds of the garbage collector. A request has hundreds of objects: with Python's own thresholds, hundreds of
requests at once are scanned again and again, for a tenth of all CPU time. A request that has ended leaves no garbage,
so these objects are in use: the collector should not stop all streams to find that out when many start at once."""


def serve(settings: Settings, show_progress: Show | None = None, *, reread: Reread | None = None) -> tuple[int, bool]:
    """Serve until a signal or a fatal error. Returns the exit code, and False if an engine could not be stopped.

    `show_progress` shows the progress of loads in a terminal; without it, the log tells it. `reread`: reads the
    configuration again when SIGHUP comes.
    """
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    raise_open_files()
    read_assets()
    runner = asyncio.Runner(loop_factory=_loop_factory())
    last_resort = LastResort()
    last_resort.start()
    with bind(settings) as listener:
        warn_if_open(listener, settings)
        if settings.log_content:
            log.warning("prompts and answers are written to this log (--log-content)")

        def started(server: MillServer) -> None:
            seconds, loop = settings.grace + LAST_RESORT_SECONDS, asyncio.get_running_loop()
            kill = functools.partial(server.mill.kill, STOPPING)
            server.on_stop = lambda: last_resort.begin(Stop(seconds, server.exit_code, kill, loop))

        serving = serve_on(listener, settings, on_start=started, show_progress=show_progress, reread=reread)
        code, clean = runner.run(serving)
    if clean and (clean := not busy_threads(THREAD_SECONDS)):
        runner.close()  # else it would wait for threads that hang, for minutes
    return code, clean


def bind(settings: Settings) -> socket.socket:
    """Bind the port before any model is loaded, so that a port in use fails at once. Raises `ModelError` if it is."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise ModelError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}. "
            "Another server may be using it; choose another port with --port."
        ) from error


def warn_if_open(listener: socket.socket, settings: Settings) -> None:
    """Warn if the API is open to the network. Checks the bound address, where names like `localhost` are resolved."""
    address = listener.getsockname()[0]
    if not settings.api_keys and not ipaddress.ip_address(address).is_loopback:
        log.warning("anyone who can reach %s can use the models: no API key is set. Set one with --api-key", address)


async def serve_on(
    listener: socket.socket,
    settings: Settings,
    *,
    make_backend: BackendMaker = generation_backend,
    on_start: Callable[[MillServer], None] = lambda _: None,
    show_progress: Show | None = None,
    reread: Reread | None = None,
) -> tuple[int, bool]:
    """Serve on a bound socket until the server is told to exit. `on_start` receives the server, to stop it later."""
    pools = Pools()
    asyncio.get_running_loop().set_default_executor(pools.joins)
    mill = Mill(settings, pools, make_backend)
    background = BackgroundTasks()
    app = create_app(
        mill.services,
        body_limit=settings.body_limit,
        upload_limit=settings.audio_bytes,
        write_timeout=settings.write_timeout,
        api_keys=settings.api_keys,
        cors_origins=settings.cors_origins,
        hosts=names_to_check(listener.getsockname()[0], settings.allowed_hosts),
        background=background,
    )
    server = MillServer(app, mill, background, settings)
    for spec in settings.specs:
        mill.add(spec)
    on_start(server)
    watcher = asyncio.create_task(_watch(mill, server, listener))
    loads = asyncio.create_task(
        LoadWatch(lambda: () if server.should_exit else mill.hub.loading(), show_progress).run()
    )
    server.exit_on_signals()
    with server.reload_on_signal(reread, pools.work):
        await server.serve(sockets=[listener])
    watcher.cancel()
    loads.cancel()
    pools.close()
    return server.exit_code, server.freed


async def _watch(mill: Mill, server: MillServer, listener: socket.socket) -> None:
    """Log where to reach the server once a model is ready. Stop the server if no model can be loaded."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("Millstream %s is listening on %s", __version__, url)
    ready = await mill.hub.settled()
    if server.should_exit:  # a cancelled load has settled too
        return
    if not ready:
        log.error("no model could be loaded")
        server.stop_soon(1)
        return
    # These objects live as long as the server. Unfrozen, each full collection would scan them, for 20 ms and more.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    lazy = [card.name for card in mill.hub.cards() if card.state == "unloaded"]
    text = ", ".join(name for name in ready if name not in lazy) or "no model loaded yet"
    text += f" ({', '.join(lazy)} at first use)" if lazy else ""
    log.info("ready: %s. Chat: %s, API: %s/v1, reference: %s/docs", text, url, url, url)


def http_protocol(settings: Settings) -> Callable[..., LimitedProtocol]:
    """The protocol factory of uvicorn. All connections share the limits."""
    limits = HttpLimits(
        header_seconds=settings.header_timeout,
        body_seconds=settings.body_timeout,
        connections=settings.max_connections,
    )
    connections = Connections(limits, open_files=open_files)
    if connections.cap < settings.max_connections:
        log.warning(
            "limited to %d connections instead of --max-connections %d: the process may open only %s files (ulimit -n)",
            connections.cap, settings.max_connections, open_files(),
        )  # fmt: skip
    return functools.partial(
        LimitedProtocol,
        limits=limits,
        connections=connections,
        error_format=DEFAULT_DIALECT.errors,
        is_websocket=is_websocket,
        take_turn=enter_new,
    )


class MillServer(uvicorn.Server):
    """A uvicorn server that shuts down in order: no new requests, drain the engines, then close the connections."""

    def __init__(self, app: object, mill: Mill, background: BackgroundTasks, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=http_protocol(settings),  # type: ignore[arg-type]
                ws="none",  # the protocol above upgrades by itself, with limits
                ws_max_size=MAX_MESSAGE,
                ws_ping_interval=PING_SECONDS,
                ws_ping_timeout=PING_SECONDS,
                ws_per_message_deflate=False,  # audio in base64 costs more time than it saves, and bombs are small
                # Not left to the environment: a peer that counts as local may use the admin routes.
                forwarded_allow_ips="127.0.0.1,::1,::ffff:127.0.0.1",
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=math.ceil(settings.grace + REQUEST_SECONDS),
            )
        )
        self.mill = mill
        self.exit_code = 0
        self.freed = True
        self.on_stop: Callable[[], None] = lambda: None
        """Is called when the stop begins, in a signal handler."""
        self._grace = settings.grace
        self._background = background

    def stop_soon(self, code: int = 0) -> None:
        """Callable at any moment, also in a signal handler. Does nothing if it stops already."""
        if not self.should_exit:
            self.exit_code, self.should_exit = code, True
            self.on_stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Each wait has a limit, and what does not end is left behind."""
        end = Deadline(self._grace + CLOSE_SECONDS)
        running = sum(card.active + card.waiting for card in self.mill.hub.cards())
        log.info(
            "shutting down%s", f": waiting for {running} running requests; Ctrl-C ends them now" if running else ""
        )
        draining = asyncio.create_task(self.mill.close(STOPPING, end))
        await super().shutdown(sockets)
        if ended := list(self.server_state.tasks):  # they were cancelled, and tell their clients why
            await asyncio.wait(ended, timeout=LAST_EVENT_SECONDS)
        await asyncio.wait([draining], timeout=end.left)
        # The engines are gone by now, so nothing is left to wait for.
        closed = await ended_by(end, {"background responses": self._background.close()})
        self.mill.close_store()
        self.freed = draining.done() and draining.result() and closed
        if not self.freed:
            self.mill.kill(STOPPING)  # what hangs must not outlive the server
        log.info("stopped" if self.freed else "stopped; work that does not end was abandoned")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets running requests finish, the second exits at once."""
        if not self.should_exit:
            self.stop_soon()
            return
        log.warning("a second signal: exiting at once")
        self.mill.kill(STOPPING)
        logging.shutdown()
        end_process(128 + sig)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would listen for them only while it serves: not while background tasks end."""
        with super().capture_signals() if sys.platform == "win32" else contextlib.nullcontext():
            yield

    def reload_on_signal(self, reread: Reread | None, pool: Executor) -> contextlib.AbstractContextManager[None]:
        """SIGHUP reads the configuration again. Without a configuration, it has its usual effect."""
        if reread is None:
            return contextlib.nullcontext()
        hang_up = functools.partial(self.handle_exit, signal.SIGTERM, None)
        return ConfigReloader(self.mill, reread, pool, hang_up=hang_up).on_signal()

    def exit_on_signals(self) -> None:
        """SIGTERM and SIGINT shut down gracefully, with exit code 0. A second signal exits at once."""
        if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
            return
        # Not the event loop's handlers: these are called also while it hangs, and up to the end of the process.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.Loop
