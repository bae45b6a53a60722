"""Start Millstream and its peers, each the way a user would."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 600

pids: dict[str, int] = {}
"""Of the servers that run, by URL."""


class NotStarted(Exception):
    """A server that exited or did not answer in time."""


def command(server: str, model: Path, port: int, more: tuple[Path, ...] = ()) -> list[str] | None:
    """The command line. Returns None if the server is not installed. Only Millstream serves `more` models."""
    ours = ["millstream", "serve", *map(str, (model, *more)), "--max-batch", "64", "--log-level", "warning"]
    known = {
        "millstream": ("millstream", ours),
        "mlx-lm": ("mlx_lm", ["mlx_lm", "server", "--model", str(model), "--log-level", "ERROR"]),
        "vllm-mlx": ("vllm_mlx", ["vllm_mlx.cli", "serve", str(model), "--continuous-batching"]),
        "mlx-vlm": ("mlx_vlm", ["mlx_vlm.server", "--model", str(model)]),
        "mlx-vlm-embeddings": ("mlx_vlm", ["mlx_vlm.server", "--embedding-model", str(model)]),
    }
    module, arguments = known[server]
    if importlib.util.find_spec(module) is None:
        return None
    return [sys.executable, "-m", *arguments, "--port", str(port)]


@contextmanager
def running(
    server: str,
    model: Path,
    extra: tuple[str, ...] = (),
    *,
    more: tuple[Path, ...] = (),
    source: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Start the server, yield its URL once it answers, and stop it afterwards. `source`: the folder to import
    Millstream from, such as another checkout's src/. `environment`: variables to add."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = command(server, model, port, more)
    assert arguments is not None, f"{server} is not installed"
    # A peer that logs every /health would flood the report. Millstream logs warnings only.
    errors = None if server == "millstream" else subprocess.DEVNULL
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
    if source is not None:
        if not (source / "millstream").is_dir():  # another build would be measured under its name
            raise NotStarted(f"there is no millstream in {source}")
        paths = [str(source.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    process = subprocess.Popen([*arguments, *extra], stdout=subprocess.DEVNULL, stderr=errors, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process)
        pids[url] = process.pid
        yield url
    finally:
        pids.pop(url, None)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def each(names: Sequence[str], model: Path, ours: str) -> Iterator[tuple[str, str, str]]:
    """Run each installed server in turn and yield its name, its URL and the model name for requests. A peer that does
    not start is skipped."""
    for name in names:
        if command(name, model, 0) is None:
            continue
        mine = name == "millstream"
        try:
            with running(name, model, tuple(ours.split()) if mine else ()) as url:
                yield name, url, "" if mine else str(model)
        except NotStarted as error:
            if mine:
                raise
            print(f"{name} is skipped: {error}")


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NotStarted(f"the server exited with code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as reply:
                body = reply.read()
            if b'"loading"' not in body:
                return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    raise NotStarted(f"{url} did not answer within {PATIENCE} s")
