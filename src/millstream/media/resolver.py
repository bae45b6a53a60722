"""DNS lookups with a time limit.

The system's resolver cannot be interrupted, so it runs on threads of its own, and the caller stops waiting when its
time is over. Resolver calls that hang occupy only those threads: further lookups queue for a free one, each within its
own time limit.

`Resolver` blocks on a future by design. It is called from the fetch threads only, never on the event loop; that is why
it is in `media/`, where `concurrent.futures` may be waited for, and not in `service/`.
"""

from __future__ import annotations

from concurrent.futures import Executor

from millstream.media.addresses import Lookup, system_lookup


class Resolver:
    """A `Lookup`. Call it from any thread that may block, except those of `pool`."""

    def __init__(self, pool: Executor, lookup: Lookup = system_lookup) -> None:
        self._pool = pool
        self._lookup = lookup

    def __call__(self, host: str, port: int, seconds: float) -> list[str]:
        future = self._pool.submit(self._lookup, host, port, seconds)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()  # drops a lookup that is still queued
            raise
