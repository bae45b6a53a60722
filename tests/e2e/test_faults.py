"""Engines that crash or hang in the middle of streams: other models keep serving, and nothing leaks."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from millstream.config import Settings
from support.fifo_gate import FifoGate
from support.held_backends import held_backend
from support.processes import ENGINE, TEMPLATE, children, children_find_us
from support.server import RunningServer, running
from support.tiny import write_servable

PATIENCE = 60
STREAMS = 16
LENGTH = 120
ENDLESS = 8000
LATE = 15.0
"""Seconds. Usually a tenth; half of what the watchdog would take."""
KILLS, FEW = 20, 4
"""With `--whole`, and without."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    # A long context, so that a stream is still running when its engine is killed, also on a busy machine.
    long = {"max_position_embeddings": 8192}
    return write_servable(root / "one", seed=1, **long), write_servable(root / "two", seed=2, **long)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets child processes import this test's backends."""
    children_find_us(monkeypatch)


class Stream(threading.Thread):
    """A client that reads a stream to its end and records when and how it ended."""

    def __init__(self, url: str, model: str, tokens: int = LENGTH) -> None:
        super().__init__()
        self._url = url
        self._body = {"model": model, "prompt": "hello", "max_tokens": tokens, "stream": True}
        self._body |= {"temperature": 0, "ignore_eos": True}
        self.began = threading.Event()
        self.lines: list[str] = []
        self.ended_at = 0.0
        self.failure: str | None = None
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=PATIENCE) as reply:
                for line in filter(None, reply.iter_lines()):
                    self.lines.append(line)
                    self.began.set()
        except httpx.HTTPError as error:
            self.failure = repr(error)
        self.ended_at = time.monotonic()
        self.began.set()

    @property
    def text(self) -> str:
        chunks = [json.loads(line.removeprefix("data: ")) for line in self.lines if "choices" in line]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    @property
    def complete(self) -> bool:
        return self.failure is None and self.lines[-1] == "data: [DONE]"


def card(server: RunningServer, name: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/v1/models/{name}", timeout=PATIENCE).json()
    return found


def wait_for_new(known: set[int]) -> psutil.Process:
    """The engine's process that is not one of these."""
    deadline = time.monotonic() + PATIENCE
    while not (found := [child for child in children(ENGINE) if child.pid not in known]):
        assert time.monotonic() < deadline, "no new engine was started"
        time.sleep(0.01)
    return found[0]


def answer(server: RunningServer, model: str) -> str:
    body = {"model": model, "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


@contextmanager
def two_models(pair: tuple[Path, Path]) -> Iterator[RunningServer]:
    settings = Settings(models=tuple(map(str, pair)), port=0, isolation="process", max_batch=STREAMS)
    with running(settings) as server:
        yield server


def test_killing_one_of_two_engines_does_not_interrupt_the_others_streams(pair: tuple[Path, Path]) -> None:
    with two_models(pair) as server:
        expected = answer(server, "two")
        dying = [Stream(server.url, "two", ENDLESS) for _ in range(STREAMS // 2)]
        living = [Stream(server.url, "one") for _ in range(STREAMS // 2)]
        for stream in (*dying, *living):
            assert stream.began.wait(PATIENCE)
        os.kill(card(server, "two")["pid"], signal.SIGKILL)
        killed_at = time.monotonic()
        for stream in (*dying, *living):
            stream.join(PATIENCE)
        assert all(stream.complete for stream in living)
        assert len({stream.text for stream in living}) == 1
        for stream in dying:
            assert "killed by signal 9" in stream.lines[-1]
            assert stream.ended_at - killed_at < LATE, "the error arrived too late"
        assert answer(server, "two") == expected, "the restarted engine gives the same answer"
        assert card(server, "two")["restarts"] == 1
        before = {child.pid for child in children(ENGINE)}
        os.kill(card(server, "two")["pid"], signal.SIGKILL)
        restarting = wait_for_new(before)
        restarting.kill()
        wait_for_new({*before, restarting.pid})
        assert answer(server, "two") == expected, "nobody had to load an engine that was killed while it loaded"
        assert card(server, "two")["restarts"] == 3
        assert card(server, "one")["restarts"] == 0


def test_twenty_kills_leave_nothing_behind(pair: tuple[Path, Path], whole: bool) -> None:
    kills = KILLS if whole else FEW
    own = psutil.Process()
    others = len(children(TEMPLATE))
    with two_models(pair) as server:
        expected = answer(server, "one")
        samples = []
        for number in range(kills):
            stream = Stream(server.url, "one", ENDLESS)
            assert stream.began.wait(PATIENCE)
            os.kill(card(server, "one")["pid"], signal.SIGKILL)
            stream.join(PATIENCE)
            assert "killed by signal 9" in stream.lines[-1]
            assert answer(server, "one") == expected
            assert len(children(ENGINE)) == 2
            if number in (kills // 4, kills - 1):
                gc.collect()
                samples.append((own.num_fds(), own.num_threads(), own.memory_info().rss))
    assert len(children(TEMPLATE)) == others
    assert not [child for child in own.children() if child.status() == psutil.STATUS_ZOMBIE]
    (fds, threads, memory), (fds_after, threads_after, memory_after) = samples
    # Less than one per life. A pool may begin another thread at any time.
    lives = kills - 1 - kills // 4
    assert fds_after - fds < min(lives, 5)
    assert threads_after - threads < min(lives, 5)
    assert memory_after - memory < 32 * 2**20, "more lives of an engine may not cost the server memory"


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_hung_step_is_detected_and_the_engine_replaced(
    isolation: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    gate = FifoGate(tmp_path / "gate")
    settings = Settings(models=(str(pair[0]),), port=0, isolation=isolation, step_timeout=3.0, stop_patience=5.0)
    with running(settings, functools.partial(held_backend, gate.remote)) as server:
        before = card(server, "one")
        stream = Stream(server.url, "one")
        gate.wait_entered()
        stream.join(PATIENCE)
        assert "--step-timeout 3" in stream.lines[-1]
        gate.open()
        assert answer(server, "one")
        after = card(server, "one")
        assert (after["state"], after["restarts"]) == ("ready", 1)
        owner = "pid" if isolation == "process" else "thread"
        assert before[owner] != after[owner]
        if isolation == "process":
            assert not psutil.pid_exists(before["pid"])
    gate.close()


def test_an_engine_exits_when_its_parent_is_gone(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """After kill -9 of the server, none of its child processes is left."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "millstream", "serve", str(pair[0]), "--port", "0", "--isolation", "process"]
    log = tmp_path / "log"
    with log.open("wb") as file, subprocess.Popen(command, stderr=file) as server:
        deadline = time.monotonic() + PATIENCE
        while "ready: one" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        left = [*children(ENGINE, server.pid), *children(TEMPLATE, server.pid)]
        server.kill()
    assert len(left) == 2
    for child in left:
        child.wait(15)
        assert not child.is_running()
