"""The life cycle of a model over HTTP: racing loads and unloads, stopped engines, loads that never end."""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from millstream.config import ModelSpec, Settings
from millstream.engine.generation.plan import GenerationBackend
from millstream.loading.backends import generation_backend
from millstream.models.source import ModelSource
from millstream.pools import WORK_THREADS
from millstream.text.tokenizer import Tokenizer
from support.fifo_gate import FifoGate
from support.held_backends import held_backend, slow_load, slow_load_of
from support.processes import ENGINE, TEMPLATE, children, children_find_us
from support.server import RunningServer, running
from support.stacks import whereabouts

PATIENCE = 60
ISOLATIONS = ["thread", "process"]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets child processes import this test's backends."""
    children_find_us(monkeypatch)


def ask(url: str, model: str = "tiny") -> httpx.Response:
    body = {"model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)


def admin(url: str, action: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/models/tiny/{action}", timeout=PATIENCE)


def card(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/v1/models/tiny", timeout=PATIENCE).json()
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_loads_unloads_and_requests_that_race_never_give_a_500(servable: Path, isolation: str, whole: bool) -> None:
    settings = Settings(models=(str(servable),), port=0, isolation=isolation, load="use", grace=0.2)
    others = len(children(TEMPLATE))
    with running(settings) as server:
        expected = ask(server.url).json()["choices"][0]["text"]
        end = time.monotonic() + (4 if whole else 2)

        def hammer(number: int) -> list[httpx.Response]:
            actions = [lambda: admin(server.url, "load"), lambda: admin(server.url, "unload"), lambda: ask(server.url)]
            replies = []
            while time.monotonic() < end:
                replies.append(actions[(number + len(replies) * (1 + number % 2)) % 3]())
            return replies

        with ThreadPoolExecutor(6) as clients:
            replies = [reply for each in clients.map(hammer, range(6)) for reply in each]
        wrong = [(reply.status_code, reply.text) for reply in replies if reply.status_code not in (200, 409, 503)]
        assert not wrong, wrong[:3]
        assert all(reply.json() for reply in replies)
        codes = {reply.json()["error"]["code"] for reply in replies if reply.status_code == 409}
        assert codes <= {"load_cancelled"}
        assert admin(server.url, "load").json()["state"] == "ready"
        assert ask(server.url).json()["choices"][0]["text"] == expected
        until(lambda: len(children(ENGINE)) == (1 if isolation == "process" else 0))
        until(lambda: len(children(TEMPLATE)) == others + 1)


def test_reloads_leave_nothing_behind(servable: Path, whole: bool) -> None:
    """On threads; `test_twenty_kills_leave_nothing_behind` does the same for processes."""
    own, reloads = psutil.Process(), 20 if whole else 10
    with running(Settings(models=(str(servable),), port=0, isolation="thread")) as server:
        samples = []
        for number in range(reloads):
            assert ask(server.url).status_code == 200
            assert admin(server.url, "unload").json()["state"] == "unloaded"
            if number in (2, reloads - 1):
                gc.collect()
                samples.append((own.num_fds(), own.num_threads(), own.memory_info().rss))
    fds, threads, memory = (last - first for first, last in zip(samples[0], samples[-1], strict=True))
    # One per load would be 7 or 17. A pool may begin another thread at any time.
    assert (fds < 4, threads < 4, memory < 64 * 2**20) == (True, True, True), samples


def test_an_engine_stopped_by_a_signal_is_detected_and_replaced(
    servable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is idle and, where the system tells, within a step, whose own limit is far away."""
    monkeypatch.setattr("millstream.service.watchdog.SILENCE_SECONDS", 2.0)
    gate = FifoGate(tmp_path / "gate")
    settings = Settings(models=(str(servable),), port=0, isolation="process", step_timeout=100_000.0)
    with running(settings, functools.partial(held_backend, gate.remote)) as server, ThreadPoolExecutor(1) as clients:
        for restarts, idle in enumerate((True, False) if sys.platform == "linux" else (True,)):
            before = card(server)["pid"]
            if idle:
                os.kill(before, signal.SIGSTOP)
            asking = clients.submit(ask, server.url)
            if not idle:
                gate.wait_entered()
                os.kill(before, signal.SIGSTOP)
            reply = asking.result(PATIENCE)
            assert reply.status_code == 503
            assert "stopped" in reply.json()["error"]["message"]
            assert int(reply.headers["retry-after"]) >= 1
            until(lambda count=restarts + 1: (card(server)["state"], card(server)["restarts"]) == ("ready", count))
            assert not psutil.pid_exists(before)
        gate.open()
        assert ask(server.url).status_code == 200
    gate.close()


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_shutdown_does_not_wait_for_a_load(servable: Path, tmp_path: Path, isolation: str) -> None:
    gate = FifoGate(tmp_path / "gate")
    settings = Settings(models=(str(servable),), port=0, isolation=isolation, load="use")
    others = len(children(TEMPLATE))
    with running(settings, functools.partial(slow_load, gate.remote)) as server, ThreadPoolExecutor(2) as clients:
        asking = [clients.submit(ask, server.url) for _ in range(2)]
        gate.wait_entered()
        server.stop_soon()
        code, clean = server.join()
        assert (code, clean) == (0, isolation == "process"), (
            "a blocked thread is left behind, so the server process must exit hard"
        )
        assert [reply.result().status_code for reply in asking] == [503, 503]
        assert not children(ENGINE)
        assert len(children(TEMPLATE)) <= others, "one of an earlier server may just end"
    gate.open()
    gate.close()


def test_a_stop_ends_the_stream_of_an_engine_that_hangs_with_an_error(
    servable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.server.REQUEST_SECONDS", 0.5)
    settings = Settings(models=(str(servable),), port=0, isolation="process", grace=0.1, stop_patience=3.0)
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        running(settings) as server,
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        os.kill(card(server)["pid"], signal.SIGSTOP)
        server.stop_soon()
        last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is shutting down"
        assert server.join() == (0, False)
    assert not children(ENGINE)


def test_a_stop_waits_for_no_thread_that_prepares_a_prompt(servable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold all threads for prompts, and the stop ends child processes."""
    entered, go = threading.Semaphore(0), threading.Event()
    encode = Tokenizer.encode

    def held(self: Tokenizer, text: str, **options: Any) -> Any:
        if text.startswith("hold"):
            entered.release()
            go.wait(PATIENCE)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", held)
    settings = Settings(models=(str(servable),), port=0, isolation="thread", grace=0.1)
    with running(settings) as server, ThreadPoolExecutor(WORK_THREADS) as clients:
        body = {"prompt": "hold" + " x" * 5000, "max_tokens": 1}
        asking = [
            clients.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
            for _ in range(WORK_THREADS)
        ]
        for _ in asking:
            assert entered.acquire(timeout=PATIENCE)
        server.stop_soon()
        assert server.join() == (0, True)
        assert "go.wait(PATIENCE)" in whereabouts()
        assert [reply.result().status_code for reply in asking] == [503] * WORK_THREADS
        go.set()


def test_an_unload_kills_the_process_of_a_load_that_does_not_end(servable: Path, tmp_path: Path) -> None:
    gate = FifoGate(tmp_path / "gate")
    settings = Settings(models=(str(servable),), port=0, isolation="process", load="use", memory=2**30)
    with running(settings, functools.partial(slow_load, gate.remote)) as server, ThreadPoolExecutor(2) as clients:
        asking = clients.submit(ask, server.url)
        gate.wait_entered()
        [child] = children(ENGINE)
        unloaded = admin(server.url, "unload").json()
        assert (unloaded["state"], unloaded["reserved_bytes"]) == ("unloaded", None)
        assert not child.is_running()
        reply = asking.result()
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "load_cancelled")
        gate.open()
        assert ask(server.url).status_code == 200
    gate.close()


def test_a_process_stopped_by_a_signal_while_loading_fails_its_load(
    servable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.service.engine_client.MAX_STOPPED_CHECKS", 2)
    monkeypatch.setattr("millstream.service.managed_model.MAX_CRASHES", 1)
    gate = FifoGate(tmp_path / "gate")
    settings = Settings(models=(str(servable),), port=0, isolation="process", load="use")
    with running(settings, functools.partial(slow_load, gate.remote)) as server, ThreadPoolExecutor(2) as clients:
        asking = clients.submit(ask, server.url)
        gate.wait_entered()
        [child] = children(ENGINE)
        child.suspend()
        reply = asking.result()
        assert (reply.status_code, "retry-after" in reply.headers) == (503, False)
        assert "stopped by a signal while it loaded" in reply.json()["error"]["message"]
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed", "models": {"tiny": "failed"}})
        assert 'millstream_model_failed{model="tiny"} 1.0' in httpx.get(f"{server.url}/metrics").text
    gate.close()


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_health_and_other_models_answer_while_a_model_loads(servable: Path, tmp_path: Path, isolation: Any) -> None:
    slow = shutil.copytree(servable, tmp_path / "slow")
    gate = FifoGate(tmp_path / "gate")
    settings = Settings(
        models=(ModelSpec(str(slow)), ModelSpec(str(servable))), port=0, isolation=isolation, load="use"
    )
    held = functools.partial(slow_load_of, "slow", gate.remote)
    with running(settings, held) as server, ThreadPoolExecutor(1) as clients:
        asking = clients.submit(ask, server.url, "slow")
        gate.wait_entered()
        assert ask(server.url).status_code == 200
        health = httpx.get(f"{server.url}/health").json()
        assert health == {"status": "ok", "models": {"slow": "loading", "tiny": "ready"}}
        assert not asking.done()
        gate.open()
        assert asking.result(PATIENCE).status_code == 200
    gate.close()


def broken_backend(source: ModelSource, settings: Settings) -> GenerationBackend:
    if source.path.name == "broken":
        raise IndexError("list index out of range")
    return generation_backend(source, settings)


def test_one_of_two_models_fails_with_an_unexpected_error(servable: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(servable, tmp_path / "broken")
    settings = Settings(models=(ModelSpec(str(broken)), ModelSpec(str(servable))), port=0, isolation="thread")
    with running(settings, broken_backend) as server:
        states = {"broken": "failed", "tiny": "ready"}
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()) == (200, {"status": "degraded", "models": states})
        reply = ask(server.url, "broken")
        assert reply.status_code == 503
        assert "IndexError: list index out of range" in reply.json()["error"]["message"]
        assert ask(server.url).status_code == 200
