"""Measure the overhead of the server itself: a backend that costs nothing, real HTTP, concurrent streams.

    python bench/server_path.py [--streams 64,256] [--tokens 500] [--pace 45000] [--isolation process]

Prints tokens delivered per second, and the CPU time per token of the HTTP process and of its children (the engine),
next to those of a bare ASGI application that sends one chunk per token. Short answers are measured as well, so that
what a request costs at its start is not counted to its tokens. Without --pace tokens come faster than they are
delivered, so several share an event; with it, as a device would make them. The clients are processes of their own
(--clients). With --profile, writes a profile of the event loop's thread.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import dataclasses
import logging
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

from instant_backend import InstantBackends
from millstream.bench.load import Load, run
from millstream.bench.processes import processes_for, run_split
from millstream.bench.report import figures, milliseconds
from millstream.config import Settings
from millstream.server import MillServer, serve_on
from models import make


def serve_instant(folder: str, streams: int, port: Any, options: argparse.Namespace) -> None:
    import uvloop

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    logging.disable(logging.INFO)  # a line per request
    settings = Settings((folder,), max_batch=streams, isolation=options.isolation)

    def started(server: MillServer) -> None:
        port.value = listener.getsockname()[1]

    profiler = cProfile.Profile()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.profile:
            profiler.enable()
        backend = InstantBackends(options.pace)
        runner.run(serve_on(listener, settings, make_backend=backend, on_start=started))
        profiler.disable()
    if options.profile:
        with open(options.profile, "w") as file:
            pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(50)


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


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def all_cpu_seconds(pid: int) -> tuple[float, float]:
    """Of a process, and of its children together."""
    return cpu_seconds(pid), sum(cpu_seconds(child) for child in children(pid))


def measure(title: str, target: Any, arguments: tuple[Any, ...], streams: int, options: argparse.Namespace) -> float:
    """Returns the CPU time per token of the server's main process, in microseconds."""
    context = multiprocessing.get_context("spawn")
    port = context.Value("i", 0)
    process = context.Process(target=target, args=tuple(port if each == "PORT" else each for each in arguments))
    process.start()
    assert process.pid is not None
    load = Load(url="", prompt_words=3, output_tokens=options.tokens, requests_per_stream=1, ignore_eos=True)
    while port.value == 0 and process.is_alive():
        time.sleep(0.05)
    load = dataclasses.replace(load, url=f"http://127.0.0.1:{port.value}")
    warm = dataclasses.replace(load, output_tokens=16)
    while process.is_alive() and figures(asyncio.run(run(warm, 4, lambda: None))).errors:
        time.sleep(0.1)  # it is not ready yet
    clients = options.clients or processes_for(streams)
    short = dataclasses.replace(load, output_tokens=options.tokens // 8)
    costs = []
    for each in (short, load):
        before = all_cpu_seconds(process.pid)
        result = figures(asyncio.run(run_split(each, streams, lambda: None, processes=clients)))
        costs.append([end - start for start, end in zip(before, all_cpu_seconds(process.pid), strict=True)])
        if result.errors:
            break
    process.terminate()
    process.join(20)
    if result.errors:
        raise SystemExit(f"{title}: {result.errors} errors, first: {result.first_error}")
    tokens = (load.output_tokens - short.output_tokens) * streams
    own, engine = ((more - less) / tokens * 1e6 for less, more in zip(*costs, strict=True))
    per_token = zip(costs[0], (own, engine), strict=True)
    request, started = (cost / streams * 1e3 - each * short.output_tokens / 1e3 for cost, each in per_token)
    print(f"{title}, {streams} streams: {result.tokens_per_second:,.0f} tokens/s, ", end="")
    print(f"CPU per token {own:.1f} us (children {engine:.1f}), ", end="")
    print(f"per request {request:.2f} ms (children {started:.2f}), ", end="")
    print(f"gap p50 {milliseconds(result.gap_p50)}, p99 {milliseconds(result.gap_p99)}, ", end="")
    print(f"/health p99 {milliseconds(result.health_p99)}, errors {result.errors}", flush=True)
    return own


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[64])
    parser.add_argument("--tokens", type=int, default=500, help="per stream")
    parser.add_argument("--pace", type=float, default=0.0, help="tokens per second of all streams; 0: no limit")
    parser.add_argument("--isolation", choices=("thread", "process"), default="thread", help="of the engine")
    parser.add_argument("--clients", type=int, default=0, help="processes; 0: by streams and cores")
    parser.add_argument("--no-bare", action="store_true", help="leave out the bare application")
    parser.add_argument("--profile", default=None)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    folder = str(make("random-tiny", Path(tempfile.gettempdir()) / "millstream-bench-random-tiny"))
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # an engine process must find the backend
    for streams in options.streams:
        bare = 0.0
        if not options.no_bare:
            bare = measure("bare ASGI application", serve_bare, (options.tokens, "PORT"), streams, options)
        ours = measure("millstream", serve_instant, (folder, streams, "PORT", options), streams, options)
        if not options.no_bare:
            print(f"ours / bare = {ours / bare:.2f}" if bare else "too little CPU time to compare: raise --tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
