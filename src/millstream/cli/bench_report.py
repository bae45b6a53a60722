"""`millstream bench --report`: measure a model, running or started for it, and write a file for an issue."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from millstream import __version__
from millstream.bench.load import Load
from millstream.bench.report_file import model_facts, report_text, save_report
from millstream.bench.suite import Suite
from millstream.cli.server_client import NoServer, ServerClient
from millstream.cli.versions import MLX_BUILDS, installed, mlx_builds
from millstream.errors import MillstreamError

LEVELS = (1, 8, 32, 64)
LOAD_PATIENCE, STOP_PATIENCE = 1800.0, 30.0
PACKAGES = ("mlx", "mlx-lm", "mlx-vlm")


def write_report(path: Path, load: Load, levels: Sequence[int], *, serve: str | None, kv_bits: Sequence[int]) -> None:
    """Measure the server of `load`, or the model `serve` in servers started here: one for each of `kv_bits`."""
    say = Console(stderr=True).print
    runs = []
    if serve is None:
        runs.append(_measured(load, levels, "", say))
        machine = machine_facts(local=_is_local(load))
    else:
        for bits in kv_bits or (0,):
            options = ["--kv-bits", str(bits)] if bits else []
            try:
                with started(serve, max(levels), options) as url:
                    own = dataclasses.replace(load, url=url, model="")
                    runs.append(_measured(own, levels, " ".join(options), say))
            except MillstreamError as error:
                if not runs:
                    raise
                say(f"{' '.join(options)}: {error.message}")  # what was measured before is worth a report
        machine = machine_facts(local=True)
    save_report(path, report_text(machine, runs))


def machine_facts(*, local: bool) -> dict[str, Any]:
    """What a figure depends on besides the model. Of a server elsewhere, only what it says itself is known."""
    if not local:
        return {"client": f"Millstream {__version__}; the server is on another machine"}
    builds = [MLX_BUILDS[name] for name in mlx_builds()]
    system = platform.mac_ver()[0] if sys.platform == "darwin" else platform.release()
    number = re.match(r"\d+(\.\d+)*", system)  # what follows may be a name of somebody's own
    return {
        "Millstream": __version__,
        **{name: version for name in PACKAGES if (version := installed(name)) is not None},
        "MLX for": ", ".join(builds) or "unknown",
        "Python": platform.python_version(),
        "system": f"{'macOS' if sys.platform == 'darwin' else platform.system()} {number[0] if number else ''}".strip(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
    }


@contextlib.contextmanager
def started(model: str, max_batch: int, options: Sequence[str]) -> Iterator[str]:
    """The URL of a server that is ended afterwards. Raises `MillstreamError` if the model does not load."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["serve", model, "--port", str(port), "--max-batch", str(max_batch), "--log-level", "warning", *options]
    process = subprocess.Popen([sys.executable, "-m", "millstream", *arguments], stdout=subprocess.DEVNULL)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    client = ServerClient(url)
    deadline = time.monotonic() + LOAD_PATIENCE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise MillstreamError(f"the server ended with exit code {process.returncode}")
        with contextlib.suppress(NoServer):  # it does not listen yet
            models = client.get("/v1/models")["data"]
            if failed := [model["error"] for model in models if model["state"] == "failed"]:
                raise MillstreamError(f"the model does not load: {failed[0]}")
            if all(model["state"] == "ready" for model in models):
                return
        time.sleep(0.2)
    raise MillstreamError(f"the model did not load within {LOAD_PATIENCE:.0f} s")


def _measured(load: Load, levels: Sequence[int], options: str, say: Any) -> dict[str, Any]:
    target = load.target
    client = ServerClient(f"{target.scheme}://{target.netloc}")
    model = _model(client, load.model)
    suite = Suite(load, max_batch=model.get("max_batch"), context_length=model.get("context_length"), say=say)
    figures = asyncio.run(suite.run(levels))
    return {"options": options, "model": model_facts(_model(client, load.model)), "figures": figures}


def _model(client: ServerClient, name: str) -> dict[str, Any]:
    """As `/v1/models` lists it; without a name, the first that can chat."""
    models: list[dict[str, Any]] = client.get("/v1/models")["data"]
    for model in models:
        named = name in (model["id"], *model.get("aliases", ()))
        if named or (not name and "completion" in model.get("capabilities", ["completion"])):
            return model
    raise MillstreamError(f"there is no model {name!r} on this server" if name else "this server has no chat model")


def _is_local(load: Load) -> bool:
    return load.target.hostname in ("127.0.0.1", "localhost", "::1")
