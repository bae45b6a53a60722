"""A link to an engine in a child process.

A crash there costs only its own requests, and the engine does not share an interpreter with HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import chain

from millstream.engine.child_environment import engine_environment
from millstream.engine.heartbeat import Beat, Heartbeat, shared_file, shared_heartbeat
from millstream.engine.link import Poller
from millstream.engine.messages import (
    Command,
    Event,
    Failed,
    Finished,
    Loaded,
    LoadFailed,
    Output,
    Outputs,
    Shutdown,
    Stopped,
    Submit,
)
from millstream.engine.owner import Sink
from millstream.engine.protocols import BackendFactory, SchedulerFactory
from millstream.engine.wire import FrameReader, frame, socket_pair
from millstream.errors import EngineGone
from millstream.logs import log_format

log = logging.getLogger(__name__)

KILLED_SECONDS = 1.0
"""For a process that was killed to be gone: one that waits for a device may take longer."""


class ProcessLink:
    """Both factories must be picklable: the child calls them. They carry an engine's own settings and nothing else.

    Neither the event loop nor a slow child ever waits for the other: a command is sent at once if the child has room
    for it, and else by a thread. Events are read where they are needed: by the poller that `start_soon` gets, without
    a thread in between, since each hand-over would cost as much as all else that is done for a token.
    This side remembers requests in flight: if the child dies, it fails them.
    """

    def __init__(self, name: str, backend: BackendFactory, scheduler: SchedulerFactory) -> None:
        self._name = name
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outgoing.put(frame((backend, scheduler, (log.getEffectiveLevel(), log_format()))))
        self._end: socket.socket | None = None
        """None before the start, and once the child is gone."""
        self._unsent = 1
        """Commands that the thread has not sent yet: later ones must wait behind them."""
        self._lock = threading.Lock()
        self._in_flight: set[int] = set()
        self._gone: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._kill_reason: str | None = None
        self._shutdown_reason: str | None = None
        self._heartbeat = Heartbeat()
        self._loaded = self._stopped = False

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

    def start_soon(self, sink: Sink, poller: Poller | None = None) -> None:
        ours, theirs = socket_pair()
        with shared_file() as memory, theirs:
            descriptors = [theirs.fileno(), memory.fileno()]
            # -P: without it, a numpy.py in the current folder would be imported
            command = [sys.executable, "-P", "-m", "millstream.engine.child", *map(str, descriptors)]
            self._process = subprocess.Popen(command, pass_fds=descriptors, env=engine_environment())
            self._heartbeat = shared_heartbeat(memory.fileno())
        log.info("%s: engine process %d", self._name, self._process.pid)
        self._end = ours
        reader = FrameReader(ours)
        self._thread(self._write, ours)
        if poller is None:
            self._thread(self._read, ours, reader, sink)
        else:
            poller.add_reader(ours, self._read_some, ours, reader, sink, poller)

    def _thread(self, target: Callable[..., None], *arguments: object) -> None:
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
            self._send(frame(command))

    def _send(self, data: bytes) -> None:
        """Called with the lock held. What the child has no room for is left to the thread."""
        sent = 0
        if not self._unsent and self._end is not None:
            try:
                sent = self._end.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:
                log.debug("%s: the engine's process accepts no more commands", self._name)
                return
        if sent < len(data):
            self._unsent += 1
            self._outgoing.put(data[sent:])

    def join(self, timeout: float) -> bool:
        if self._process is None:
            return True
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_SECONDS)
            return False
        return True

    def _write(self, end: socket.socket) -> None:
        try:
            while (data := self._outgoing.get()) is not None:
                end.sendall(data)
                with self._lock:
                    self._unsent -= 1
        except OSError:
            log.debug("%s: the engine's process accepts no more commands", self._name)

    def _read(self, end: socket.socket, reader: FrameReader, sink: Sink) -> None:
        """On a thread of its own, for callers without a poller."""
        while not self._stopped:
            select.select([end], [], [])
            if not self._take(reader, sink):
                self._report_exit(sink)
        self._close(end)

    def _read_some(self, end: socket.socket, reader: FrameReader, sink: Sink, poller: Poller) -> None:
        """Called by the poller when there is something to read."""
        alive = self._take(reader, sink)
        if alive and not self._stopped:
            return
        poller.remove_reader(end)
        self._close(end)
        if not alive:
            self._thread(self._report_exit, sink)  # it waits for the process

    def _take(self, reader: FrameReader, sink: Sink) -> bool:
        """Passes on the events of all steps that have come. Returns False if the child is gone without a last word."""
        try:
            steps: list[list[Event]] | None = reader.read()
        except (EOFError, OSError):
            return False
        if not steps:
            return True  # only a part of one has come
        events = steps[0] if len(steps) == 1 else list(chain.from_iterable(steps))
        self._note(events)
        if self._stopped:  # then it is the last one
            events = [*events[:-1], *self._fail_in_flight(self._shutdown_reason or "the engine stopped"), events[-1]]
        sink(events)
        return True

    def _report_exit(self, sink: Sink) -> None:
        reason = self._exit_reason()
        # Whoever ends a process says why.
        log.log(logging.ERROR if self._kill_reason is None else logging.DEBUG, "%s: %s", self._name, reason)
        first: list[Event] = [] if self._loaded else [LoadFailed(reason, self._crashed(), died=True)]
        self._stopped = True
        sink([*first, *self._fail_in_flight(reason), Stopped(reason)])

    def _close(self, end: socket.socket) -> None:
        with self._lock:
            self._end = None
        self._outgoing.put(None)
        end.close()

    def _note(self, events: list[Event]) -> None:
        ended = []
        for event in events:
            if isinstance(event, Output | Outputs):
                continue  # nearly all are
            if isinstance(event, Finished | Failed):
                ended.append(event.request_id)
            elif isinstance(event, Loaded | LoadFailed):
                self._loaded = True
            elif isinstance(event, Stopped):
                self._stopped = True
        if ended:
            with self._lock:
                self._in_flight.difference_update(ended)

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
        why = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
        return self._kill_reason or f"the engine's process {how}{why}"
