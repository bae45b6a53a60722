"""The child process of a download: `python -m millstream.models.hub_child`. See `hub.download`.

The first line of its input is the job. It writes lines: progress, then a folder or an error. It ends when its input
does, so it does not outlive the process that wants the download.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from millstream.errors import ModelError
from millstream.models.hub_errors import FAILURES, reason_of
from millstream.models.hub_fetch import Repository, fetch

EVENT = "millstream: "
"""Begins the lines that are ours. Others are what a library has to say."""
REPORT_SECONDS = 0.2


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    cache_dir = None if job["cache_dir"] is None else Path(job["cache_dir"])
    repository = Repository(job["repo"], job["revision"], job["commit"], tuple(job["allowed"]), tuple(job["ignored"]))
    try:
        with Reporter() as progress:
            folder = fetch(repository, progress=progress, cache_dir=cache_dir, endpoint=job["endpoint"])
    except ModelError as error:
        _write({"error": error.message})
    except FAILURES as error:
        _write({"error": reason_of(repository.repo, error), "unreachable": True})
    else:
        _write({"folder": str(folder)})


class Reporter:
    """Writes the progress a few times per second, not for each chunk; also that of a download which stalls then. Called
    on any thread. Leaving it writes the last of it."""

    def __init__(self) -> None:
        self._latest: tuple[int, int] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def __call__(self, done: int, total: int) -> None:
        self._latest = done, total

    def _run(self) -> None:
        told = None
        over = False
        while not over:
            over = self._over.wait(REPORT_SECONDS)
            latest = self._latest
            if latest is not None and latest != told:
                told = latest
                _write({"done": latest[0], "total": latest[1]})


def _write(event: dict[str, Any]) -> None:
    sys.stdout.write(f"{EVENT}{json.dumps(event)}\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
