"""SIGHUP to a real `millstream serve` under load: models come, go and change, and nothing else is disturbed."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.tiny import write_servable

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")

PATIENCE = 60

START = """
[server]
isolation = "thread"
queue = 100

[models.steady]
source = "one"
alias = "default"
[models.going]
source = "two"
[models.changing]
source = "three"
max_tokens = 7
"""

CHANGED = """
[server]
isolation = "thread"
queue = 200

[models.changing]
source = "three"
max_tokens = 5
alias = ["default", "other"]
pin = true
idle_unload = "1h"
[models.steady]
source = "one"
[models.coming]
source = "two"
load = "use"
"""


class Server:
    """`millstream serve` as a process, with its log."""

    def __init__(self, *arguments: str, **options: Any) -> None:
        command = [sys.executable, "-m", "millstream", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_line(self, pattern: str, count: int = 1) -> re.Match[str]:
        """The `count`th line with this pattern."""

        def found() -> list[re.Match[str]]:
            return [match for line in self.lines if (match := re.search(pattern, line))]

        with self._changed:
            self._changed.wait_for(lambda: len(found()) >= count or self.process.poll() is not None, PATIENCE)
            matches = found()
        assert len(matches) >= count, f"{pattern!r} is not {count} times in:\n" + "".join(self.lines)
        return matches[count - 1]

    def url(self) -> str:
        return self.wait_line(r"ready: .* (http://[\d.:]+)/v1")[1]

    def hang_up(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        self.process.wait()
        with self._changed:
            self._changed.notify_all()


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def run(*arguments: str, **options: Any) -> Server:
        started.append(Server(*arguments, **options))
        return started[-1]

    yield run
    for server in started:
        server.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("one", "two", "three"), 1):
        write_servable(root / name, seed=seed)
    return root


def ask(url: str, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": "hello", "ignore_eos": True, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)


def cards(url: str) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in httpx.get(f"{url}/v1/models", timeout=PATIENCE).json()["data"]}


@contextmanager
def asked_again_and_again(url: str, *models: str) -> Iterator[dict[str, list[int]]]:
    """Requests to these models, one after the other, until the block ends. Yields the status codes so far."""
    stop = threading.Event()
    codes: dict[str, list[int]] = {model: [] for model in models}

    def repeat(model: str) -> None:
        while not stop.is_set():
            codes[model].append(ask(url, model, max_tokens=40).status_code)

    with ThreadPoolExecutor(len(models)) as pool:
        ends = [pool.submit(repeat, model) for model in models]
        try:
            yield codes
        finally:
            stop.set()
        for end in ends:
            end.result()


def test_models_change_under_load(start: Callable[..., Server], folder: Path) -> None:
    file = folder / "mill.toml"
    file.write_text(START)
    server = start("--config", str(file))
    url = server.url()
    server.wait_line(re.escape(f"config file: {file}"))
    before = cards(url)
    assert list(before) == ["steady", "going", "changing"]
    body = {"model": "going", "prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 32}
    with asked_again_and_again(url, "steady", "changing") as codes:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()
            next(lines)
            file.write_text(CHANGED)
            server.hang_up()
            server.wait_line("configuration reloaded: added: coming; removed: going; updated: changing, steady$")
            assert list(cards(url)) == ["changing", "steady", "coming"]
            assert ask(url, "going").status_code == 404
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert sum('"finish_reason":"length"' in line for line in rest) == 32, "every choice is whole"
        server.wait_line("going: removed; its running requests finish first")
        server.wait_line("going: unloaded: removed from the configuration")
        server.wait_line("take effect when the server is started again: queue$")
        metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
        assert re.search(r'^millstream_requests_total\{.*"going"', metrics, re.MULTILINE), "what was counted stays"
        assert not re.search(r'^millstream_(model_ready|prefix_cache_bytes)\{.*"going"', metrics, re.MULTILINE)
        after = cards(url)
        for name in ("steady", "changing"):
            assert after[name]["thread"] == before[name]["thread"], "it was not loaded again"
            assert len([line for line in server.lines if f"{name}: loaded in" in line]) == 1
        assert (after["changing"]["aliases"], after["changing"]["pinned"]) == (["default", "other"], True)
        assert after["coming"]["state"] == "unloaded"
        chat = {"model": "other", "messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
        reply = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=PATIENCE).json()
        assert reply["usage"]["completion_tokens"] == 5, "the new default"
        assert ask(url, "default").json()["model"] == ask(url, "").json()["model"] == "changing"
        assert ask(url, "coming", max_tokens=2).status_code == 200

        file.write_text(CHANGED + "[models.bad]\nsorce = 'one'\n")
        server.hang_up()
        error = server.wait_line("nothing has changed: (.*)")[1]
        assert "[models.bad] has no option 'sorce'; did you mean 'source'?" in error
        assert list(cards(url)) == ["changing", "steady", "coming"]

        file.write_text(CHANGED.replace("pin = true", "max_batch = 4"))
        server.hang_up()
        server.wait_line("configuration reloaded: reloaded: changing$")
        server.wait_line("changing: loaded in", 2)
        assert ask(url, "changing").status_code == 200
        changed = cards(url)["changing"]
        assert (changed["max_batch"], changed["pinned"]) == (4, False)
    for name, sent in codes.items():
        assert sent and set(sent) == {200}, f"a request to {name} was disturbed: {sent}"
    assert not [line for line in server.lines if "Traceback" in line]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_ends_the_server_unless_it_was_told_to_stay(
    start: Callable[..., Server], folder: Path, nohup: bool
) -> None:
    file = folder / "terminal.toml"
    file.write_text('[models.one]\nsource = "one"\nisolation = "process"\n')
    master, slave = pty.openpty()

    def take_terminal() -> None:
        import fcntl
        import termios

        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)  # the tests may run under nohup

    try:
        server = start(
            "--config", str(file), stdin=slave, pass_fds=[slave], start_new_session=True, preexec_fn=take_terminal
        )
        os.close(slave)
        url = server.url()
        engine = cards(url)["one"]["pid"]
        server.hang_up()  # a signal while the terminal is open reloads
        server.wait_line("configuration reloaded: no changes")
    finally:
        os.close(master)
    if nohup:
        server.wait_line("configuration reloaded: no changes", 2)
        os.killpg(server.process.pid, signal.SIGHUP)  # as a shell does to its jobs
        server.wait_line("configuration reloaded: no changes", 3)
        assert ask(url, "one").status_code == 200
        assert (cards(url)["one"]["pid"], cards(url)["one"]["restarts"]) == (engine, 0), "its engine stays too"
        server.process.send_signal(signal.SIGTERM)
    else:
        server.wait_line("the terminal has closed")
    assert server.process.wait(PATIENCE) == 0
