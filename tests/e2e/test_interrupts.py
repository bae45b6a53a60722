"""Ctrl-C and SIGTERM while a model is downloaded or loaded: real processes, real signals."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from support.commands import PATIENCE, Command
from support.hub_server import HubServer
from support.processes import ENGINE
from support.slow_start import BEGUN, ENDED
from support.tiers import some

TINY = "mill/tiny"
KEPT = 256 * 1024
"""Bytes of the weights that are on disk when the hub holds them: one chunk. More if the download tried again."""


@pytest.fixture(scope="module")
def files(servable: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in servable.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[HubServer]:
    """Sends a part of the weights, and then nothing until it is released."""
    with HubServer({TINY: files}) as server:
        server.hold_after = KEPT + 1000
        yield server


def assert_ended_in_order(command: Command) -> None:
    lines = command.text
    assert lines.index("shutting down") < lines.index("I stopped")
    assert "ready:" not in lines
    assert "Traceback" not in lines and "never retrieved" not in lines


@pytest.mark.parametrize(
    ("number", "isolation"),
    some(
        [(number, isolation) for number in (signal.SIGINT, signal.SIGTERM) for isolation in ("thread", "process")],
        [(signal.SIGINT, "thread"), (signal.SIGTERM, "process")],
    ),
)
def test_a_signal_ends_a_load_between_weights(servable: Path, number: signal.Signals, isolation: str) -> None:
    with Command("support.slow_start", "endless", "600", str(servable), "--isolation", isolation) as command:
        command.wait_line(BEGUN)
        command.send(number)
        assert command.wait() == 0
        assert_ended_in_order(command)
        assert command.text.index("shutting down") < command.text.index(ENDED)


@pytest.mark.parametrize("isolation", some(["thread", "process"], ["thread"]))
def test_a_load_that_hangs_is_left_behind(servable: Path, isolation: str) -> None:
    with Command("support.slow_start", "stuck", "1", str(servable), "--isolation", isolation) as command:
        command.wait_line(BEGUN)
        children = psutil.Process(command.pid).children(recursive=True)
        command.send(signal.SIGINT)
        assert command.wait() == 0
        assert_ended_in_order(command)
        psutil.wait_procs(children, PATIENCE)
        assert not [child for child in children if child.is_running()]


def test_a_second_signal_ends_a_load_that_hangs_now(servable: Path) -> None:
    with Command("support.slow_start", "stuck", "600", str(servable), "--isolation", "thread") as command:
        command.wait_line(BEGUN)
        command.send(signal.SIGINT)
        command.wait_line("shutting down")
        command.send(signal.SIGINT)
        assert command.wait() == 128 + signal.SIGINT
        command.wait_line("a second signal")
        assert "ready:" not in command.text


def test_a_download_is_shown_and_ended_by_a_signal(hub: HubServer, tmp_path: Path, files: dict[str, bytes]) -> None:
    arguments = ("serve", TINY, "--port", "0", "--cache-dir", str(tmp_path))
    environment = {"HF_ENDPOINT": hub.url}
    with Command("millstream", *arguments, environment=environment) as command:
        url = command.wait_line(r"listening on (\S+)")[1]
        assert hub.held.wait(PATIENCE)
        card = until_downloading(url)
        assert 0 < card["progress"] < 1
        command.wait_line(r"downloading: .* of .*, \d+ %")
        children = psutil.Process(command.pid).children(recursive=True)
        command.send(signal.SIGINT)
        assert command.wait() == 0
        assert_ended_in_order(command)
        psutil.wait_procs(children, PATIENCE)
        assert not [child for child in children if child.is_running()]
    kept = partial_bytes(tmp_path)
    assert kept >= KEPT
    hub.release()
    hub.sent.clear()
    with Command("millstream", *arguments, environment=environment) as command:
        command.wait_line("ready: mill/tiny")
        assert hub.sent["model.safetensors"] == len(files["model.safetensors"]) - kept
        command.send(signal.SIGTERM)
        assert command.wait() == 0


def test_a_hub_that_never_answers_holds_up_no_request_and_no_stop(
    hub: HubServer, servable: Path, tmp_path: Path
) -> None:
    """More models wait for it than there are threads for prompts: those and the end of child processes need one."""
    hub.silent = True
    waiting = 5
    config = tmp_path / "mill.toml"
    sources = {"tiny": str(servable), **{f"far{number}": f"mill/far{number}" for number in range(waiting)}}
    config.write_text("".join(f"[models.{name}]\nsource = {json.dumps(source)}\n" for name, source in sources.items()))
    arguments = ("serve", "--config", str(config), "--port", "0", "--cache-dir", str(tmp_path))
    with Command("millstream", *arguments, environment={"HF_ENDPOINT": hub.url}) as command:
        url = command.wait_line(r"listening on (\S+)")[1]
        for _ in range(waiting):
            assert hub.asked.acquire(timeout=PATIENCE)
        command.wait_line("tiny: loaded in")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "word " * 1000}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE)
        assert "the prompt has 50" in answer.text, "it is too long, as a thread for prompts has found"
        command.send(signal.SIGTERM)
        assert command.wait() == 0
        assert_ended_in_order(command)
        command.wait_line("left behind: the thread wait_0, in ")


def test_a_signal_before_the_server_runs_ends_it_with_0(servable: Path, tmp_path: Path) -> None:
    config = tmp_path / "mill.toml"
    config.write_text("")
    with Command("millstream", "serve", str(servable), "--config", str(config), "--port", "0") as command:
        command.wait_line("config file")  # what follows are seconds of imports
        command.send(signal.SIGTERM)
        assert command.wait() == 0
        assert "Traceback" not in command.text


def test_a_stop_that_hangs_is_ended_and_says_what_it_leaves(servable: Path) -> None:
    with Command("support.slow_start", "deaf", "1", str(servable), "--isolation", "process", "--grace", "0") as command:
        command.wait_line("ready: ")
        [engine] = [child for child in psutil.Process(command.pid).children() if ENGINE in child.cmdline()]
        engine.suspend()  # it would end by itself when its parent is gone
        command.send(signal.SIGTERM)
        assert command.wait() == 0
        command.wait_line("left behind: the thread MainThread, in hang ")
        command.wait_line(f"left behind: the process {engine.pid}: .*{ENGINE}")
        psutil.wait_procs([engine], PATIENCE)
        assert not engine.is_running()


def test_a_stop_that_hangs_with_python_s_lock_is_ended_too(servable: Path) -> None:
    """No thread of ours runs then, to say what is left or to choose the exit code."""
    arguments = (str(servable), "--isolation", "thread", "--grace", "0")
    with Command("support.slow_start", "locked", "1", *arguments) as command:
        command.wait_line("ready: ")
        command.send(signal.SIGTERM)
        assert command.wait() == 1
        command.wait_line(r"File .*slow_start.py., line \d+ in hang")


def until_downloading(url: str) -> dict[str, float]:
    deadline = time.monotonic() + PATIENCE
    while True:
        [card] = httpx.get(f"{url}/v1/models", timeout=PATIENCE).json()["data"]
        if card["phase"] == "downloading" and card["progress"]:
            return card
        assert time.monotonic() < deadline, card
        time.sleep(0.1)


@pytest.mark.parametrize("number", some([signal.SIGINT, signal.SIGTERM], [signal.SIGINT]))
def test_an_interrupted_pull_continues_where_it_stopped(
    hub: HubServer, tmp_path: Path, files: dict[str, bytes], number: signal.Signals
) -> None:
    arguments = ("pull", TINY, "--cache-dir", str(tmp_path))
    environment = {"HF_ENDPOINT": hub.url}
    with Command("millstream", *arguments, environment=environment) as command:
        assert hub.held.wait(PATIENCE)
        command.wait_line(r"of .*, \d+ %")
        until_partial(tmp_path)
        children = psutil.Process(command.pid).children(recursive=True)
        command.send(number)
        assert command.wait() == 130
        assert "the same command continues there" in command.text
        assert "Traceback" not in command.text
        psutil.wait_procs(children, PATIENCE)
        assert not [child for child in children if child.is_running()]
    kept = partial_bytes(tmp_path)
    hub.release()
    hub.sent.clear()
    with Command("millstream", *arguments, environment=environment) as command:
        assert command.wait() == 0
        assert f"{TINY} is complete" in command.text
    assert hub.sent["model.safetensors"] == len(files["model.safetensors"]) - kept


def partial_bytes(folder: Path) -> int:
    """The size of the one partial file. Nothing else may be left that is half."""
    [partial] = [path for path in folder.rglob("*") if "incomplete" in path.name or path.name.startswith("tmp_")]
    return partial.stat().st_size


def until_partial(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not any(path.stat().st_size >= KEPT for path in folder.rglob("*.incomplete")):
        assert time.monotonic() < deadline, list(folder.rglob("*"))
        time.sleep(0.05)


def test_a_terminal_shows_a_live_line_and_takes_ctrl_c(servable: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        command = [sys.executable, "-m", "support.slow_start", "endless", "600", str(servable), "--isolation", "thread"]
        places = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")])
        os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": places})
    shown, interrupted = "", False
    deadline = time.monotonic() + 2 * PATIENCE
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            data = os.read(terminal, 4096).decode(errors="replace")
        except OSError:  # Linux: the process has ended
            break
        if not data:
            break
        shown += data
        if not interrupted and re.search(r"\r\x1b\[2Ktiny: reading weights: \d+ %", shown):
            os.write(terminal, b"\x03")
            interrupted = True
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert interrupted, shown
    assert os.waitstatus_to_exitcode(status) == 0
    assert re.search(r"\r\x1b\[2K\S+ I shutting down", shown), "the log goes above the line"
    assert "ready:" not in shown
