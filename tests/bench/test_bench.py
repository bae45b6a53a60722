"""The load generator, against our own server and one that ends responses by closing the connection; the scripts."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import importlib.util
import json
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from millstream.bench.client import _text
from millstream.bench.load import Load, request_body, run
from millstream.bench.processes import processes_for, run_split
from millstream.bench.report import figures, percentile
from millstream.cli import main
from millstream.config import Settings
from support.server import running
from support.tiny import write_servable


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write_servable(tmp_path_factory.mktemp("bench") / "tiny")
    with running(Settings((str(folder),), port=0, max_batch=4)) as server:
        yield server.url


def test_the_command_prints_and_writes_what_it_saw(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "figures.json", tmp_path / "plot.png"
    common = ["--levels", "1,3", "--output-tokens", "6", "--prompt-words", "4", "--ignore-eos"]
    assert main(["bench", url, *common, "--json", str(out), "--plot", str(picture)]) == 0
    assert "tokens/s" in capsys.readouterr().out
    levels = json.loads(out.read_text())["levels"]
    assert [(level["streams"], level["requests"], level["errors"]) for level in levels] == [(1, 2, 0), (3, 6, 0)]
    assert [level["tokens"] for level in levels] == [12, 36]
    assert all(level["first_p50"] > 0 and level["health_p99"] > 0 for level in levels)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_errors_are_counted_and_shown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", url, "--model", "nobody", "--levels", "2", "--no-warmup"]) == 1
    assert "4 errors at 2 streams" in capsys.readouterr().err
    assert main(["bench", "127.0.0.1:9", "--levels", "1", "--no-warmup", "--requests", "1"]) == 1


def test_requests_at_random_times(url: str) -> None:
    load = Load(url, output_tokens=3, prompt_words=3, rate=200.0, requests_per_stream=4, ignore_eos=True)
    seen = figures(asyncio.run(run(load, 2, lambda: None)))
    assert (seen.requests, seen.errors, seen.tokens) == (8, 0, 24)


def test_requests_that_end_in_time_are_not_cut(url: str) -> None:
    load = Load(url, output_tokens=3, prompt_words=3, requests_per_stream=2, ignore_eos=True, seconds=60.0)
    seen = figures(asyncio.run(run(load, 2, lambda: None)))
    assert (seen.requests, seen.errors, seen.cut, seen.tokens) == (4, 0, 0, 12)


def test_several_processes_send_what_one_would(url: str) -> None:
    load = Load(url, output_tokens=3, prompt_words=3, requests_per_stream=2, ignore_eos=True)
    done: list[None] = []
    result = asyncio.run(run_split(load, 3, lambda: done.append(None), processes=2))
    seen = figures(result)
    assert (seen.streams, seen.requests, seen.errors, seen.tokens, len(done)) == (3, 6, 0, 18, 6)
    assert all(seconds is not None for seconds in result.health)


def test_streams_decide_how_many_processes_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert [processes_for(streams) for streams in (1, 32, 64, 128, 256)] == [1, 1, 2, 4, 4]
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert processes_for(256) == 1


def test_prompts_are_reproducible_and_share_what_they_should() -> None:
    load = Load("x", shared_words=5, prompt_words=5)
    first, second = request_body(load, 1)["messages"], request_body(load, 2)["messages"]
    assert first == request_body(load, 1)["messages"]
    assert first != second
    texts = [messages[0]["content"].split() for messages in (first, second)]  # type: ignore[index]
    assert texts[0][:5] == texts[1][:5]
    assert texts[0][5:] != texts[1][5:]


def test_percentiles() -> None:
    values = [number / 1000 for number in range(1, 101)]
    assert percentile(values, 0.5) == pytest.approx(50)
    assert percentile(values, 0.99) == pytest.approx(99)
    assert percentile(values, 1.0) == pytest.approx(100)
    assert percentile([], 0.5) is None


class OldServer(BaseHTTPRequestHandler):
    """HTTP/1.0: an answer is over when the connection is. `cut` leaves out the end."""

    cut = False

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        chunk = {"choices": [{"index": 0, "delta": {"content": "hi"}}]}
        for _ in range(3):
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if not self.cut:
            self.wfile.write(b"data: [DONE]\n\n")

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize("cut", [False, True])
def test_a_server_that_closes_the_connection_when_it_is_done(cut: bool) -> None:
    handler = type("Handler", (OldServer,), {"cut": cut})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        load = Load(f"http://127.0.0.1:{server.server_address[1]}", requests_per_stream=1)
        seen = figures(asyncio.run(run(load, 1, lambda: None)))
        server.shutdown()
        thread.join()
    assert (seen.errors, seen.tokens) == ((1, 0) if cut else (0, 3))


@pytest.mark.parametrize("rate", [None, 100.0])
def test_a_level_stops_when_its_time_is_up(rate: float | None) -> None:
    """What has arrived counts, and no further request is sent."""

    class Endless(OldServer):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            chunk = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": "hi"}}]}).encode() + b"\n\n"
            with contextlib.suppress(OSError):  # the client has gone
                while True:
                    self.wfile.write(chunk)
                    time.sleep(0.01)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Endless) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        load = Load(url, requests_per_stream=1_000, rate=rate, seconds=0.5)
        seen = figures(asyncio.run(run(load, 2, lambda: None)))
        server.shutdown()
        thread.join()
    assert seen.errors == 0 and seen.cut == seen.requests
    assert (seen.requests == 2) if rate is None else (2 < seen.requests < 200)
    assert seen.tokens > seen.requests and seen.tokens_per_second == pytest.approx(seen.tokens / seen.seconds)


SCRIPTS = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.name)
def test_what_the_scripts_import_exists(script: Path) -> None:
    """Most scripts take minutes, so no test runs them: a renamed module or class would go unnoticed."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("millstream"):
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            # A module that nobody has imported yet is no attribute of its package.
            assert [name for name in missing if importlib.util.find_spec(f"{node.module}.{name}") is None] == []


def test_the_benchmark_of_the_servers_own_cost_runs() -> None:
    """It has its own backend, which must implement the current protocol."""
    script = SCRIPTS / "server_path.py"
    command = [sys.executable, str(script), "--streams", "2", "--tokens", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert ["errors 0" in line for line in done.stdout.splitlines()[:2]] == [True, True], done.stdout


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"delta": {"content": "mill"}}, "mill"),
        ({"delta": {"reasoning": "why"}}, "why"),
        ({"delta": {"tool_calls": [{"index": 0, "function": {"name": "grind", "arguments": ""}}]}}, "grind"),
        ({"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}, {"index": 1}]}}, "{}"),
        ({"delta": {}}, ""),
        ({"text": "plain"}, "plain"),
    ],
)
def test_text_of_every_kind_is_received(choice: dict[str, Any], text: str) -> None:
    """Also that of a request whose whole answer is a tool call."""
    assert _text(choice) == text
