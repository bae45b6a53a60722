"""A link to an engine in a child process.

A crash there costs only its own requests, and the engine does not share an interpreter with HTTP.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

from millstream.engine.child_environment import engine_environment
from millstream.engine.heartbeat import Beat, Heartbeat, shared_file, shared_heartbeat
from millstream.engine.messages import Command, Event, Failed, Finished, Loaded, LoadFailed, Shutdown, Stopped, Submit
from millstream.engine.owner import Sink
from millstream.engine.protocols import BackendFactory, SchedulerFactory
from millstream.errors import EngineGone
from millstream.logs import log_format

log = logging.getLogger(__name__)


class ProcessLink:
    """Both factories must be picklable: the child calls them. They carry an engine's own settings and nothing else.

    Two threads serve the pipe, so that neither the event loop nor a slow child ever waits for the other. This side
    remembers requests in flight: if the child dies, it fails them.
    """

    def __init__(self, name: str, backend: BackendFactory, scheduler: SchedulerFactory) -> None:
        self._name = name
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outgoing.put(pickle.dumps((backend, scheduler, (log.getEffectiveLevel(), log_format()))))
        self._lock = threading.Lock()
        self._in_flight: set[int] = set()
        self._gone: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._kill_reason: str | None = None
        self._shutdown_reason: str | None = None
        self._heartbeat = Heartbeat()

    def where(self) -> tuple[int | None, int | None]:
        """The child's main thread is the owner; on Linux it has the id of its process."""
        pid = None if self._process is None or self._process.returncode is not None else self._process.pid
        return pid, pid

    def heartbeat(self) -> Beat:
        return self._heartbeat.read()

    def stopped(self) -> bool:
        """Asks the system without reaping the child, which `Popen` does. Not available on macOS."""
        if sys.platform != "linux" or self._process is None or self._process.returncode is not None:
            return False
        try:
            found = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # reaped just now
            return False
        return found is not None

    def disown(self, reason: str) -> None:
        """Kills the child; its requests then fail like those of any child that died."""
        self._kill_reason = reason
        if self._process is not None:
            self._process.kill()

    def kill(self, reason: str) -> None:
        self.disown(reason)

    def start_soon(self, sink: Sink) -> None:
        ours, theirs = multiprocessing.Pipe()
        with shared_file() as memory:
            descriptors = [theirs.fileno(), memory.fileno()]
            # -P: without it, a numpy.py in the current folder would be imported
            command = [sys.executable, "-P", "-m", "millstream.engine.child", *map(str, descriptors)]
            self._process = subprocess.Popen(command, pass_fds=descriptors, env=engine_environment())
            self._heartbeat = shared_heartbeat(memory.fileno())
        theirs.close()
        log.info("%s: engine process %d", self._name, self._process.pid)
        for target, arguments in ((self._write, (ours,)), (self._read, (ours, sink))):
            threading.Thread(target=target, args=arguments, name=f"link-{self._name}", daemon=True).start()

    def post_soon(self, command: Command) -> None:
        # One lock for the check and the insertion: a request is either refused here or failed by `_fail_in_flight`.
        with self._lock:
            if self._gone is not None:
                raise EngineGone(self._gone)
            if isinstance(command, Submit):
                self._in_flight.add(command.request_id)
            elif isinstance(command, Shutdown):
                self._shutdown_reason = self._shutdown_reason or command.reason
            self._outgoing.put(pickle.dumps(command, pickle.HIGHEST_PROTOCOL))

    def join(self, timeout: float) -> bool:
        if self._process is None:
            return True
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def _write(self, connection: Connection) -> None:
        try:
            while (data := self._outgoing.get()) is not None:
                connection.send_bytes(data)
        except OSError:
            log.debug("%s: the engine's process accepts no more commands", self._name)

    def _read(self, connection: Connection, sink: Sink) -> None:
        stopped = loaded = False
        try:
            while not stopped:
                events: list[Event] = pickle.loads(connection.recv_bytes())
                self._remove_ended(events)
                stopped = any(isinstance(event, Stopped) for event in events)
                loaded = loaded or any(isinstance(event, Loaded | LoadFailed) for event in events)
                if stopped:
                    events = [*self._fail_in_flight(self._shutdown_reason or "the engine stopped"), *events]
                sink(events)
        except (EOFError, OSError):
            reason = self._exit_reason()
            # Whoever ends a process says why.
            log.log(logging.ERROR if self._kill_reason is None else logging.DEBUG, "%s: %s", self._name, reason)
            first: list[Event] = [] if loaded else [LoadFailed(reason, self._crashed())]
            sink([*first, *self._fail_in_flight(reason), Stopped(reason)])
        finally:
            self._outgoing.put(None)
            connection.close()

    def _remove_ended(self, events: list[Event]) -> None:
        with self._lock:
            self._in_flight.difference_update(
                event.request_id for event in events if isinstance(event, Finished | Failed)
            )

    def _fail_in_flight(self, reason: str) -> list[Event]:
        """Accept no more commands, and fail requests in flight."""
        with self._lock:
            self._gone = reason
            remaining, self._in_flight = self._in_flight, set()
        return [Failed(request_id, reason, gone=True) for request_id in sorted(remaining)]

    def _crashed(self) -> bool:
        """True if the child failed by itself: nobody ended it, and the system did not for its memory."""
        assert self._process is not None
        code = self._process.wait()
        return self._kill_reason is None and code < 0 and -code not in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)

    def _exit_reason(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return self._kill_reason or f"the engine's process {how}"
