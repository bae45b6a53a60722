"""What is done for a request before it gets a row, by a thread beside the owner: work that never touches MLX."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from millstream.errors import MillstreamError

log = logging.getLogger(__name__)

Errand = Callable[[], None]
"""Done if it returns. What it raises is told to the request that waits for it."""

CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Done:
    request_id: int | None
    error: str | None = None


class Errands:
    """For one owner, which never waits here but in `close`. One thread, from the first errand on, in order.

    It is a daemon: an errand cannot be interrupted, and one that does not end must keep neither the engine nor the
    process from going. Whoever waits is always told, whatever an errand raises; after `close`, nobody waits.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called on the thread when there is something in `done`."""
        self._wake = wake
        self._orders: queue.SimpleQueue[tuple[int | None, Errand] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="errands", daemon=True)

    def run_soon(self, request_id: int | None, errand: Errand) -> None:
        """`request_id`: who waits for it, if anyone."""
        if self._thread.ident is None:
            self._thread.start()
        self._orders.put((request_id, errand))

    def done(self) -> Iterable[Done]:
        while not self._done.empty():
            yield self._done.get_nowait()

    def close(self) -> None:
        """Do no more of them. One that is under way is given a moment, and then left alone."""
        self._closing.set()
        self._orders.put(None)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                log.warning("what was being prepared for a request does not end and is left alone")

    def _run(self) -> None:
        while (order := self._orders.get()) is not None and not self._closing.is_set():
            request_id, errand = order
            self._done.put(Done(request_id, _outcome(errand)))
            self._wake()


def _outcome(errand: Errand) -> str | None:
    """What went wrong, as one line."""
    try:
        errand()
    except MillstreamError as error:
        return error.message
    except BaseException as error:  # a panic of native code is no Exception, and someone waits to be told
        log.exception("preparing a request failed")
        return f"{type(error).__name__}: {error}"
    return None
