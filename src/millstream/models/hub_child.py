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
import time
from pathlib import Path
from typing import Any

from millstream.errors import ModelError
from millstream.models.hub_errors import FAILURES, reason_of
from millstream.models.hub_fetch import Repository, fetch

EVENT = "millstream: "
"""Begins the lines that are ours. Others are what a library has to say."""
REPORT_SECONDS = 0.2
_writing = threading.RLock()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    cache_dir = None if job["cache_dir"] is None else Path(job["cache_dir"])
    repository = Repository(job["repo"], job["revision"], job["commit"], tuple(job["allowed"]), tuple(job["ignored"]))
    try:
        folder = fetch(repository, progress=_Reporter(), cache_dir=cache_dir, endpoint=job["endpoint"])
    except ModelError as error:
        _write({"error": error.message})
    except FAILURES as error:
        _write({"error": reason_of(repository.repo, error), "unreachable": True})
    else:
        _write({"folder": str(folder)})


class _Reporter:
    """Writes the progress a few times per second, not for each chunk; also that of a download which stalls then."""

    def __init__(self) -> None:
        self._latest: tuple[int, int] | None = None
        self._told: tuple[int, int] | None = None
        threading.Thread(target=self._tell_now_and_then, daemon=True).start()

    def __call__(self, done: int, total: int) -> None:
        self._latest = done, total
        if done == total:
            self._tell()

    def _tell_now_and_then(self) -> None:
        while True:
            self._tell()
            time.sleep(REPORT_SECONDS)

    def _tell(self) -> None:
        with _writing:
            latest = self._latest
            if latest is not None and latest != self._told:
                self._told = latest
                _write({"done": latest[0], "total": latest[1]})


def _write(event: dict[str, Any]) -> None:
    with _writing:
        sys.stdout.write(f"{EVENT}{json.dumps(event)}\n")
        sys.stdout.flush()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
