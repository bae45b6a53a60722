"""`millstream serve` as an installed command, from any environment and any folder."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 180.0
READY = re.compile(r"ready: .* (http://[\d.:]+)/v1")


@contextmanager
def serving(
    *command: str | Path, arguments: Sequence[str] = (), cwd: Path, env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Starts the server on a free port and yields its URL. Its log goes to a file: nobody needs to read a pipe."""
    log = cwd / "server.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*command, "serve", "--port", "0", *arguments], cwd=cwd, env=env, stdout=sink, stderr=sink
        )
    try:
        yield _wait_for_url(process, log)
        process.terminate()
        assert process.wait(PATIENCE) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE)


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := READY.search(log.read_text()):
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"not ready after {PATIENCE:.0f} s:\n{log.read_text()}")
