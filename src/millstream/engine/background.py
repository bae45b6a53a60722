"""A thread beside the owner for work that a request needs before it may run, such as compiling a grammar.

The work never touches MLX, and the owner never waits for it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from millstream.errors import BadRequest, MillstreamError

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0

SECONDS_PER_BYTE = 20e-6
"""The delay of a task per byte of its input: small tasks overtake large ones, and none starves, since a task of 250 KB
can be overtaken for 5 s only."""

STACK_BYTES = 16 << 20
"""The thread's stack: grammars are compiled by recursion, and threads on macOS have 512 KiB by default."""


@dataclass(frozen=True, slots=True)
class BackgroundTask:
    """Done when `run` returns. If it raises, the request that waits for it fails with that error."""

    run: Callable[[], None]
    size: int = 0
    """The bytes of its input."""


@dataclass(frozen=True, slots=True)
class Done:
    request_id: int | None
    error: str | None = None
    refused: bool = False
    """True if the client's input caused the error."""


@dataclass(frozen=True, slots=True, order=True)
class _Queued:
    due: float
    number: int
    request_id: int | None = field(compare=False)
    task: BackgroundTask = field(compare=False)


class BackgroundThread:
    """One thread per owner, started with the first task; small tasks first. The owner waits only in `close`.

    It is a daemon: a task cannot be interrupted, and one that does not end must not keep the engine or the process
    from stopping. Every request gets its outcome, whatever a task raises; after `close`, none is needed.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called on the thread when there is something in `done`."""
        self._wake = wake
        self._changed = threading.Condition()
        self._queue: list[_Queued] = []
        self._numbers = itertools.count()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)

    def run_soon(self, request_id: int | None, task: BackgroundTask) -> None:
        """`request_id`: the request that waits for it, if any."""
        if self._thread.ident is None:
            _start(self._thread)
        due = time.monotonic() + task.size * SECONDS_PER_BYTE
        with self._changed:
            heapq.heappush(self._queue, _Queued(due, next(self._numbers), request_id, task))
            self._changed.notify()

    def cancel(self, request_id: int) -> None:
        """Drop the task of a request that has ended. One that is running goes on."""
        with self._changed:
            left = [queued for queued in self._queue if queued.request_id != request_id]
            if len(left) < len(self._queue):
                heapq.heapify(left)
                self._queue = left

    def done(self) -> Iterable[Done]:
        while not self._done.empty():
            yield self._done.get_nowait()

    def close(self) -> None:
        """Drop queued tasks. A running one gets a moment, and is then abandoned."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                log.warning("a background task does not end and is abandoned")

    def _run(self) -> None:
        while (queued := self._next()) is not None:
            self._done.put(_outcome(queued))
            self._wake()

    def _next(self) -> _Queued | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._queue)
            return None if self._closing else heapq.heappop(self._queue)


def _start(thread: threading.Thread) -> None:
    """Python sets the stack size for all threads that start afterwards, so it is reset."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)


def _outcome(queued: _Queued) -> Done:
    try:
        queued.task.run()
    except MillstreamError as error:
        return Done(queued.request_id, error.message, refused=isinstance(error, BadRequest))
    except BaseException as error:  # a panic of native code is no Exception, and the request waits for an outcome
        log.exception("a background task failed")
        return Done(queued.request_id, f"{type(error).__name__}: {error}")
    return Done(queued.request_id)
