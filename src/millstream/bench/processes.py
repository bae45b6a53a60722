"""Generate load from several processes: at 45,000 events per second one Python client would measure itself.

Each worker is `python -m millstream.bench.processes`. It gets its part of the level, makes and connects the first
requests, says that it is ready, waits for the word to start, so that all start together, and sends back its samples.
Their clock is one for all processes, and nothing else runs in them meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from typing import BinaryIO

from millstream.bench.load import Load, Result, prepare, run

STREAMS_PER_PROCESS = 32
"""A server at 200 tokens per second and stream then takes a worker a tenth of a core or two."""

SHARE_OF_CORES = 4
"""The workers take at most one core of so many: the server needs the others."""

READY, DONE, RESULT = b"ready\n", b"done\n", b"result "
LINE_LIMIT = 2**16


def processes_for(streams: int) -> int:
    """How many processes should drive so many streams on this machine."""
    return max(1, min(streams // STREAMS_PER_PROCESS, (os.cpu_count() or 1) // SHARE_OF_CORES))


async def run_split(
    load: Load, streams: int, done: Callable[[], None], *, processes: int, first_number: int = 0
) -> Result:
    """Like `load.run`, with the streams divided among processes, which have `--rate` in proportion. A single stream has
    nothing to share its process with, and needs no other."""
    if streams < 2:
        return await run(load, streams, done, first_number=first_number)
    parts = _parts(load, streams, min(processes, streams), first_number)
    workers = [await _started(part) for part in parts]
    try:
        await asyncio.gather(*(_ready(worker) for worker in workers))
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(b"\n")
        results = await asyncio.gather(*(_result(worker, done) for worker in workers))
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()
    samples = [sample for result in results for sample in result.samples]
    return Result(streams, samples, [seconds for result in results for seconds in result.health])


Part = tuple[Load, int, int]
"""A worker's load, streams and first number."""


def _parts(load: Load, streams: int, processes: int, first_number: int) -> Sequence[Part]:
    parts = []
    for worker in range(processes):
        share = streams * (worker + 1) // processes - streams * worker // processes
        rate = None if load.rate is None else load.rate * share / streams
        parts.append((load.with_rate(rate), share, first_number))
        first_number += share * load.requests_per_stream
    return parts


async def _started(part: Part) -> Process:
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "millstream.bench.processes", stdin=PIPE, stdout=PIPE, limit=LINE_LIMIT
    )
    assert worker.stdin is not None
    data = pickle.dumps(part)
    worker.stdin.write(b"%d\n" % len(data) + data)
    return worker


async def _ready(worker: Process) -> None:
    assert worker.stdout is not None
    if await worker.stdout.readline() != READY:
        raise RuntimeError("a worker of the load generator did not start")


async def _result(worker: Process, done: Callable[[], None]) -> Result:
    assert worker.stdout is not None
    while (line := await worker.stdout.readline()) == DONE:
        done()
    if not line.startswith(RESULT):
        raise RuntimeError("a worker of the load generator ended early")
    result: Result = pickle.loads(await worker.stdout.readexactly(int(line[len(RESULT) :])))
    return result


def _work(commands: BinaryIO, reports: BinaryIO) -> None:
    load, streams, first_number = pickle.loads(commands.read(int(commands.readline())))

    def report(line: bytes) -> None:
        reports.write(line)
        reports.flush()

    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        prepared = runner.run(prepare(load, streams, first_number))
        gc.collect()
        gc.freeze()  # a full collection would scan all modules, for milliseconds
        report(READY)
        if not commands.readline():
            return  # the parent has gone
        result = runner.run(run(load, streams, lambda: report(DONE), first_number=first_number, prepared=prepared))
    data = pickle.dumps(result)
    report(RESULT + b"%d\n" % len(data) + data)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


if __name__ == "__main__":
    _work(sys.stdin.buffer, sys.stdout.buffer)
