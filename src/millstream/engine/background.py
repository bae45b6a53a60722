"""What is done for a request before it gets a row, by a thread beside the owner: work that never touches MLX."""

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

BackgroundTask = Callable[[], None]
"""Done if it returns. What it raises is told to the request that waits for it."""

CLOSE_SECONDS = 1.0

SECONDS_PER_BYTE = 20e-6
"""How much later than it came an errand is due, for each byte of its size: small ones overtake large ones, and none
waits for ever, since 250 KB are overtaken for 5 s only."""

STACK_BYTES = 16 << 20
"""Of the thread: grammars are compiled by recursion, and threads of macOS have 512 KiB."""


@dataclass(frozen=True, slots=True)
class Done:
    request_id: int | None
    error: str | None = None
    refused: bool = False
    """Whether the error is the client's: what it sent cannot be served."""


@dataclass(frozen=True, slots=True, order=True)
class _Order:
    due: float
    number: int
    request_id: int | None = field(compare=False)
    errand: BackgroundTask = field(compare=False)


class BackgroundThread:
    """For one owner, which never waits here but in `close`. One thread, from the first errand on; small ones first.

    It is a daemon: an errand cannot be interrupted, and one that does not end must keep neither the engine nor the
    process from going. Whoever waits is always told, whatever an errand raises; after `close`, nobody waits.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called on the thread when there is something in `done`."""
        self._wake = wake
        self._changed = threading.Condition()
        self._orders: list[_Order] = []
        self._numbers = itertools.count()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="errands", daemon=True)

    def run_soon(self, request_id: int | None, errand: BackgroundTask, size: int = 0) -> None:
        """`request_id`: who waits for it, if anyone. `size`: bytes of what it works on."""
        if self._thread.ident is None:
            _start(self._thread)
        due = time.monotonic() + size * SECONDS_PER_BYTE
        with self._changed:
            heapq.heappush(self._orders, _Order(due, next(self._numbers), request_id, errand))
            self._changed.notify()

    def cancel(self, request_id: int) -> None:
        """Nobody waits for it any more. One that is under way goes on."""
        with self._changed:
            kept = [order for order in self._orders if order.request_id != request_id]
            if len(kept) < len(self._orders):
                heapq.heapify(kept)
                self._orders = kept

    def done(self) -> Iterable[Done]:
        while not self._done.empty():
            yield self._done.get_nowait()

    def close(self) -> None:
        """Do no more of them. One that is under way is given a moment, and then left alone."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                log.warning("what was being prepared for a request does not end and is left alone")

    def _run(self) -> None:
        while (order := self._next()) is not None:
            self._done.put(_outcome(order))
            self._wake()

    def _next(self) -> _Order | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._orders)
            return None if self._closing else heapq.heappop(self._orders)


def _start(thread: threading.Thread) -> None:
    """With a stack of its own size, which Python sets for all threads that start from then on."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)


def _outcome(order: _Order) -> Done:
    """What went wrong, as one line."""
    try:
        order.errand()
    except MillstreamError as error:
        return Done(order.request_id, error.message, refused=isinstance(error, BadRequest))
    except BaseException as error:  # a panic of native code is no Exception, and someone waits to be told
        log.exception("preparing a request failed")
        return Done(order.request_id, f"{type(error).__name__}: {error}")
    return Done(order.request_id)
