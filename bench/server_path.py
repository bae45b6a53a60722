"""Measure the overhead of the server itself: a backend that costs nothing, real HTTP, concurrent streams.

    python bench/server_path.py [--streams 64] [--tokens 2000] [--profile profile.txt]

Prints tokens delivered per second and the server's CPU time per token, next to those of a bare ASGI application that
sends one chunk per token. With --profile, writes a profile of the server (the event loop's thread and the engine's).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import dataclasses
import multiprocessing
import os
import pstats
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvicorn

from millstream.bench.load import Load, run
from millstream.bench.report import figures, milliseconds
from millstream.config import Settings
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import GenerationBackend, Plan, RowOutput, StepResult
from millstream.engine.protocols import Progress, ignore_progress
from millstream.loading.settings import EngineSettings
from millstream.model_facts import GenerationFacts
from millstream.models.source import ModelSource
from millstream.server import MillServer, serve_on
from models import make


class InstantBackend:
    """A backend that costs nothing: every row gets a token in every step."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._token = 0

    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        return GenerationFacts(2**20, 2048, self._rows, 0, "none", "gpu (none)")

    def background_task(self, request: Generate | None) -> None:
        return None

    def memory_bytes(self) -> int:
        return 0

    def step(self, plan: Plan) -> StepResult:
        self._token = self._token % 1000 + 300
        token = (self._token,)
        return StepResult(tuple(RowOutput(request_id, token) for request_id in plan.decode))

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


def serve_instant(folder: str, streams: int, port: Any, profile: str | None) -> None:
    import uvloop

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    settings = Settings((folder,), max_batch=streams, isolation="thread")
    servers: list[MillServer] = []

    def started(server: MillServer) -> None:
        servers.append(server)
        port.value = listener.getsockname()[1]

    def backend(source: ModelSource, settings: EngineSettings) -> GenerationBackend:
        return InstantBackend(settings.max_batch)

    profiler = cProfile.Profile()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if profile:
            profiler.enable()
        runner.run(serve_on(listener, settings, make_backend=backend, on_start=started))
        profiler.disable()
    if profile:
        with open(profile, "w") as file:
            pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(40)


def serve_bare(tokens: int, port: Any) -> None:
    """A bare ASGI application that only sends one event per token."""
    import orjson

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(tokens):
            chunk = orjson.dumps({"choices": [{"index": 0, "delta": {"content": " word"}}]})
            await send({"type": "http.response.body", "body": b"data: " + chunk + b"\n\n", "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    port.value = listener.getsockname()[1]
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="warning", lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(title: str, target: Any, arguments: tuple[Any, ...], options: argparse.Namespace) -> float:
    context = multiprocessing.get_context("spawn")
    port = context.Value("i", 0)
    filled = tuple(port if argument == "PORT" else argument for argument in arguments)
    process = context.Process(target=target, args=filled)
    process.start()
    assert process.pid is not None
    load = Load(url="", prompt_words=3, output_tokens=options.tokens, requests_per_stream=1, ignore_eos=True)

    while port.value == 0 and process.is_alive():
        time.sleep(0.05)
    load = dataclasses.replace(load, url=f"http://127.0.0.1:{port.value}")

    async def drive() -> tuple[Any, float]:
        before = cpu_seconds(process.pid)
        result = figures(await run(load, options.streams, lambda: None))
        return result, cpu_seconds(process.pid) - before

    warm = dataclasses.replace(load, output_tokens=16)
    while process.is_alive() and figures(asyncio.run(run(warm, 4, lambda: None))).errors:
        time.sleep(0.1)  # it is not ready yet
    result, seconds = asyncio.run(drive())
    process.terminate()
    process.join(20)
    tokens = options.tokens * options.streams
    cost = seconds / tokens * 1e6
    print(f"{title}: {result.tokens_per_second:,.0f} tokens/s delivered, {cost:.1f} us of CPU per token, ", end="")
    print(f"/health p99 {milliseconds(result.health_p99)}, errors {result.errors} {result.first_error or ''}")
    if result.errors:
        raise SystemExit(1)
    return cost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--profile", default=None)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    folder = make("random-tiny", Path(tempfile.gettempdir()) / "millstream-bench-random-tiny")
    bare = measure("bare ASGI application", serve_bare, (options.tokens, "PORT"), options)
    ours = measure("millstream", serve_instant, (str(folder), options.streams, "PORT", options.profile), options)
    print(f"ours / bare = {ours / bare:.2f}" if bare else "too little CPU time to compare: raise --tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
