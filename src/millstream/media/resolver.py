"""Looks names up within a time. The system's resolver cannot be interrupted, so it runs on threads of its own, and who
waits for it goes when its time is over. A resolver that hangs takes those threads and no more: further names wait for
one of them, each for its own time."""

from __future__ import annotations

from concurrent.futures import Executor, Future

from millstream.media.addresses import LookUp, system_look_up


class Resolver:
    """A `LookUp`. Called from any thread but those of `pool`."""

    def __init__(self, pool: Executor, look_up: LookUp = system_look_up) -> None:
        self._pool = pool
        self._look_up = look_up
        self._pending: set[Future[list[str]]] = set()

    def __call__(self, host: str, port: int, seconds: float) -> list[str]:
        future = self._pool.submit(self._look_up, host, port, seconds)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()  # one that has not begun never will
            raise

    @property
    def hanging(self) -> bool:
        return any(future.running() for future in tuple(self._pending))
