"""Measure how long tokens wait in the HTTP process while other requests start and end.

    python bench/burst.py [--streams 64] [--tokens 96] [--step 8] [--rounds 10]

All streams of a round start at once. The backend costs nothing, runs in a process of its own and makes a token of every
row in every step, which takes --step milliseconds. It notes when each step ends; the HTTP process notes when it has
written the step's tokens to the sockets. So the figures do not contain what the clients do:

- wait: from the end of the step until all its tokens are written; in seconds, and in CPU time that the HTTP process
  used meanwhile, which other programs on the machine do not change much
- gap: between the times at which the tokens of two successive steps are written, counted once per stream

Each for the steps before all streams run (start), while all do, and after the first has ended (end). The gaps and first
tokens that the clients saw follow, and the CPU time per request.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instant_backend import InstantBackends, StepTimes
from millstream.bench.load import Load, run
from millstream.bench.processes import run_split
from millstream.bench.report import figures, milliseconds, percentile
from millstream.config import Settings
from millstream.engine.messages import Event, Outputs
from millstream.server import MillServer, serve_on
from millstream.service.engine_client import EngineClient
from models import make
from server_path import all_cpu_seconds

PHASES = ("start", "middle", "end")

Step = tuple[float, int, float, float]
"""When its tokens were written, how many, and how long they waited: seconds, and seconds of CPU time."""


def serve_timed(folder: str, streams: int, port: Any, seconds: float, times: str, report: str) -> None:
    import uvloop

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    logging.disable(logging.INFO)  # a line per request
    steps: list[Step] = []
    ended = StepTimes(times, os.getpid())
    receive = EngineClient._receive

    def timed(client: EngineClient, events: Sequence[Event]) -> None:
        receive(client, events)
        for event in events:
            if isinstance(event, Outputs):
                steps.append((time.perf_counter(), len(event.values), *ended.since(event.values[0])))

    EngineClient._receive = timed  # type: ignore[method-assign]

    def started(server: MillServer) -> None:
        port.value = listener.getsockname()[1]

    settings = Settings((folder,), max_batch=streams, isolation="process")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_on(listener, settings, make_backend=InstantBackends(0.0, seconds, times), on_start=started))
    Path(report).write_text(json.dumps(steps))


def phases(steps: Sequence[Step], streams: int) -> dict[str, list[tuple[int, float, float, float | None]]]:
    """Rows, wait, wait in CPU time, and the gap before it, of each step by its phase. A pause parts two rounds."""
    found: dict[str, list[tuple[int, float, float, float | None]]] = {phase: [] for phase in PHASES}
    reached = False
    before: float | None = None
    for written, rows, wait, cpu in steps:
        gap = None if before is None or written - before > 0.2 else written - before
        if gap is None:
            reached = False
        reached = reached or rows == streams
        phase = "start" if not reached else "middle" if rows == streams else "end"
        found[phase].append((rows, wait, cpu, gap))
        before = written
    return found


def show(steps: Sequence[Step], streams: int) -> None:
    for phase, rows in phases(steps, streams).items():
        waits = [each for count, wait, _, _ in rows for each in itertools.repeat(wait, count)]
        costs = [each for count, _, cpu, _ in rows for each in itertools.repeat(cpu, count)]
        gaps = [each for count, _, _, gap in rows if gap is not None for each in itertools.repeat(gap, count)]
        text = []
        for name, values in (("wait", waits), ("wait CPU", costs), ("gap", gaps)):
            shown = "/".join(f"{percentile(values, share) or 0:.2f}" for share in (0.5, 0.9, 0.99, 1.0))
            text.append(f"{name} {shown}")
        print(f"  {phase:6} {len(rows):5} steps; p50/p90/p99/max in ms: {', '.join(text)}", flush=True)


def measure(options: argparse.Namespace, folder: str, scratch: Path) -> None:
    times, report = scratch / "times", scratch / "report"
    times.touch()
    context = multiprocessing.get_context("spawn")
    port = context.Value("i", 0)
    arguments = (folder, options.streams, port, options.step / 1000, str(times), str(report))
    process = context.Process(target=serve_timed, args=arguments)
    process.start()
    assert process.pid is not None
    while port.value == 0 and process.is_alive():
        time.sleep(0.05)
    load = Load(
        url=f"http://127.0.0.1:{port.value}",
        prompt_words=options.words,
        output_tokens=options.tokens,
        requests_per_stream=1,
        ignore_eos=True,
    )
    warm = dataclasses.replace(load, output_tokens=16)
    while process.is_alive() and figures(asyncio.run(run(warm, 4, lambda: None))).errors:
        time.sleep(0.1)  # it is not ready yet
    time.sleep(0.5)
    samples, seen = [], []
    before = all_cpu_seconds(process.pid)[0]
    for number in range(options.rounds):
        first = (number + 1) * options.streams
        result = asyncio.run(
            run_split(load, options.streams, lambda: None, processes=options.clients, first_number=first)
        )
        samples += result.samples
        seen.append(figures(result))
        time.sleep(0.3)
    cost = (all_cpu_seconds(process.pid)[0] - before) / len(samples) * 1000
    process.terminate()
    process.join(20)
    errors = [sample.error for sample in samples if sample.error]
    if errors:
        raise SystemExit(f"{len(errors)} errors, first: {errors[0]}")
    steps = json.loads(report.read_text())
    warmed = next(index for index, step in enumerate(steps) if step[1] > 4)
    show(steps[warmed:], options.streams)
    gaps = [gap for sample in samples for gap in sample.gaps]
    p50, p99 = milliseconds(percentile(gaps, 0.5)), milliseconds(percentile(gaps, 0.99))
    firsts = [sample.first for sample in samples if sample.first is not None]
    print(f"  clients: gap p50 {p50}, p99 {p99}; first token p50 {milliseconds(percentile(firsts, 0.5))}, ", end="")
    print(f"p99 {milliseconds(percentile(firsts, 0.99))}; HTTP process: {cost:.2f} ms of CPU per request", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96, help="per stream")
    parser.add_argument("--words", type=int, default=15, help="of a prompt")
    parser.add_argument("--step", type=float, default=8.0, help="milliseconds that a step takes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=1, help="processes")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    folder = str(make("random-tiny", Path(tempfile.gettempdir()) / "millstream-bench-random-tiny"))
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # an engine process must find the backend
    with tempfile.TemporaryDirectory() as scratch:
        measure(options, folder, Path(scratch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
