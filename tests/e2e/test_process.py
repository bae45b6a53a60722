"""`millstream serve` as a process: startup, signals, exit codes, and errors at startup."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from support.commands import PATIENCE, Command
from support.tiers import some


class Process(Command):
    """Runs `millstream serve` and reads its log."""

    def __init__(self, *arguments: str) -> None:
        super().__init__("millstream", "serve", "--port", "0", *arguments)

    def url(self) -> str:
        return self.wait_line(r"ready: .* (http://[\d.:]+)/v1")[1]

    def child(self) -> int:
        """The process id of its engine."""
        return int(self.wait_line(r"engine process (\d+)")[1])


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def run(*arguments: str) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield run
    for process in started:
        process.end()


@pytest.fixture(scope="module")
def idle(servable: Path) -> Iterator[Process]:
    """A server that is ready, for tests that only look at it."""
    process = Process(str(servable), "--isolation", "thread")
    try:
        process.url()
        yield process
        process.send(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.end()


@pytest.mark.parametrize(
    ("number", "isolation"),
    some(
        [(number, isolation) for number in (signal.SIGTERM, signal.SIGINT) for isolation in ("thread", "process")],
        [(signal.SIGINT, "thread"), (signal.SIGTERM, "process")],
    ),
)
def test_a_signal_ends_an_idle_server_with_0(
    start: Callable[..., Process], servable: Path, number: signal.Signals, isolation: str
) -> None:
    process = start(str(servable), "--isolation", isolation)
    url = process.url()
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "models": {"tiny": "ready"}}
    process.send(number)
    assert process.wait() == 0
    assert process.wait_line("stopped")
    assert not [line for line in process.lines if "Traceback" in line or "Exception ignored" in line]


@pytest.mark.parametrize("isolation", some(["thread", "process"], ["process"]))
def test_sigterm_lets_a_running_request_finish(start: Callable[..., Process], servable: Path, isolation: str) -> None:
    process = start(str(servable), "--isolation", isolation)
    url = process.url()
    body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.send(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert process.wait() == 0


@pytest.mark.parametrize(
    ("number", "isolation"),
    some(
        [(number, isolation) for number in (signal.SIGINT, signal.SIGTERM) for isolation in ("thread", "process")],
        [(signal.SIGINT, "process"), (signal.SIGTERM, "thread")],
    ),
)
def test_a_second_signal_ends_it_now(
    start: Callable[..., Process], servable: Path, isolation: str, number: signal.Signals
) -> None:
    process = start(str(servable), "--isolation", isolation, "--grace", "600")
    url = process.url()
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 32}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as stream:
        next(stream.iter_raw())
        child = psutil.Process(process.child()) if isolation == "process" else None
        if child is not None:
            child.suspend()  # it cannot end by itself
        process.send(number)
        process.wait_line("shutting down")
        process.send(number)
        assert process.wait() == 128 + number
    assert process.wait_line("a second signal")
    if child is not None:
        child.wait(PATIENCE)
    assert not [line for line in process.lines if "Traceback" in line]


def test_a_second_signal_ends_a_load(start: Callable[..., Process], servable: Path) -> None:
    process = start(str(servable), "--isolation", "process")
    child = psutil.Process(process.child())
    child.suspend()
    process.send(signal.SIGTERM)
    process.wait_line("shutting down")
    process.send(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    child.wait(PATIENCE)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: reads /proc")
def test_loading_a_model_leaves_the_limit_of_open_files(idle: Process) -> None:
    """mlx-lm lowers it to 2,048 when it is imported, and the hard limit to 4,096, which only root may raise again."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lines = Path(f"/proc/{idle.pid}/limits").read_text().splitlines()
    soft = int(next(line for line in lines if line.startswith("Max open files")).split()[3])
    assert soft >= min(hard, 4096)


def test_a_crashed_engine_is_an_error_and_the_server_stays_up(start: Callable[..., Process], servable: Path) -> None:
    process = start(str(servable), "--isolation", "process")
    url = process.url()
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 16}  # takes a while
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(process.child(), signal.SIGKILL)
        rest = [line for line in lines if line]
    assert "killed by signal 9" in rest[-1]
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "models": {"tiny": "loading"}}
    again = httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 5}, timeout=PATIENCE)
    assert again.status_code == 200, "a request waits while the engine restarts"
    process.send(signal.SIGTERM)
    assert process.wait() == 0


def test_the_log_names_blas_and_dtype(idle: Process) -> None:
    line = idle.wait_line(r"tiny: loaded in .*")[0]
    assert "float32 weights" in line
    if sys.platform == "linux" and "cpu (" in line:
        assert re.search(r"MKL|NVPL BLAS|OpenBLAS", line), line


def test_a_port_in_use_is_a_clear_error(start: Callable[..., Process], servable: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(str(servable), "--port", str(port))
        assert process.wait() == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in process.lines[-1]
    assert "--port" in process.lines[-1]


@pytest.mark.parametrize(
    ("name", "words"),
    some(
        [
            ("missing", "no such folder or file"),
            ("empty", "no config.json"),
            ("broken", "Model type martian not supported"),
            ("truncated", "incomplete download"),
            ("mismatched", "parameters"),
        ],
        [("missing", "no such folder or file"), ("mismatched", "parameters")],
    ),
)
def test_startup_fails_with_a_reason_if_the_model_cannot_be_served(
    start: Callable[..., Process], servable: Path, tmp_path: Path, name: str, words: str
) -> None:
    folder = tmp_path / name
    if name != "missing":
        folder.mkdir()
    if name in ("broken", "truncated", "mismatched"):
        for file in servable.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    config = folder / "config.json"
    if name == "broken":
        config.write_text(config.read_text().replace('"llama"', '"martian"'))
    if name == "truncated":
        (folder / "model.safetensors").write_bytes((servable / "model.safetensors").read_bytes()[:5000])
    if name == "mismatched":
        config.write_text(config.read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    process = start(str(folder))
    assert process.wait() == 1
    log = "".join(process.lines)
    assert words in log
    assert "no model could be loaded" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--port", "99999"], "0 to 65535"), (["--max-batch", "0"], "from 1"), (["--grace", "soon"], "number of seconds")],
)
def test_bad_options_are_clear_errors(start: Callable[..., Process], arguments: list[str], words: str) -> None:
    process = start(*arguments)
    assert process.wait() == 2
    assert words in "".join(process.lines)
