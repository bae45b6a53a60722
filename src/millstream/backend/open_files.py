"""Raises the limit of open files of this process. Imports no MLX: the server calls it before anything is loaded.

mlx-lm sets the limit to 2,048 when it is imported, and the hard limit to 4,096, whatever they were before. With an
engine on a thread that is the server's own process, in which every connection is an open file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

WANTED = 65_536

if sys.platform == "win32":

    def open_files() -> int | None:
        return None

    def raise_open_files(wanted: int = WANTED) -> None:
        return

else:
    import resource

    def open_files() -> int | None:
        """How many files this process may have open. None: no limit."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return None if soft == resource.RLIM_INFINITY else soft

    def raise_open_files(wanted: int = WANTED) -> None:
        """Raise the soft limit towards `wanted`, as far as the system allows. Never lowers it."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        while soft != resource.RLIM_INFINITY and soft < allowed:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            except (ValueError, OSError):  # macOS has an upper bound of its own, which it does not report
                allowed //= 2
            else:
                return


@contextmanager
def preserve_open_files() -> Iterator[None]:
    """Wraps an import that may lower the limit, and raises it again. It never lowers it, so two such blocks on two
    threads cannot undo each other. Without privileges a lowered hard limit stays, and bounds what is restored."""
    before = open_files()
    hard = _hard_limit()
    try:
        yield
    finally:
        _restore_hard_limit(hard)
        raise_open_files(WANTED if before is None else before)


if sys.platform == "win32":

    def _hard_limit() -> int:
        return 0

    def _restore_hard_limit(hard: int) -> None:
        return

else:

    def _hard_limit() -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def _restore_hard_limit(hard: int) -> None:
        """Only root may raise it; for other users this does nothing."""
        soft, now = resource.getrlimit(resource.RLIMIT_NOFILE)
        if now != hard and now != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or now < hard):
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            except (ValueError, OSError):
                return
