"""Inputs per second over HTTP: requests of many inputs, and loops over single inputs, here and at mlx-vlm's own server.

Both servers run during the whole measurement, and requests go to them in turn: what else the machine does slows both.
CPU time per input (all threads of a server) varies less on a busy machine.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

import servers
from embedding_inputs import inputs


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of all inputs: elapsed, and of the server's CPU time."""

    wall: float
    cpu: float


class Server:
    def __init__(self, name: str, url: str, model: str) -> None:
        self.name = name
        self._model = model
        self._client = httpx.Client(base_url=url, timeout=600)
        self._processes = _processes(url.rpartition(":")[2])

    def embed(self, texts: list[str]) -> None:
        body = {"model": self._model, "input": texts} if self._model else {"input": texts}
        reply = self._client.post("/v1/embeddings", json=body)
        reply.raise_for_status()
        assert len(reply.json()["data"]) == len(texts)

    def cost(self, texts: list[str], *, at_once: bool) -> Cost:
        """Of one request with all texts, or of one after the other."""
        started, used = time.perf_counter(), self._cpu_seconds()
        for some in [texts] if at_once else [[text] for text in texts]:
            self.embed(some)
        return Cost(time.perf_counter() - started, self._cpu_seconds() - used)

    def _cpu_seconds(self) -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in self._processes))


def _processes(port: str) -> list[psutil.Process]:
    """The server on this port, which was started here, and its engines."""
    (server,) = (child for child in psutil.Process().children() if port in child.cmdline())
    return [server, *server.children(recursive=True)]


def compare(folder: Path, cases: list[tuple[str, int]], rounds: int, peer: bool, preload: str | None) -> None:
    with ExitStack() as stack:
        everyone = [Server("Millstream", stack.enter_context(servers.running("millstream", folder)), "")]
        if peer and servers.command("mlx-vlm-embeddings", folder, 0) is not None:
            changes = {"LD_PRELOAD": preload} if preload else {}
            url = stack.enter_context(servers.running("mlx-vlm-embeddings", folder, environment=changes))
            everyone.append(Server("mlx-vlm", url, str(folder)))
        for server in everyone:
            server.embed(inputs("mixed", 8, -1))
        ways = [(server, at_once) for server in everyone for at_once in (True, False)]
        print("inputs per second (CPU milliseconds per input), medians of rounds\n")
        names = [f"{server.name}, {'one request' if at_once else 'one by one'}" for server, at_once in ways]
        print(f"| inputs | {' | '.join(names)} | {' | '.join(f'against {name}' for name in names[1:])} |")
        print("|---" * (2 * len(names)) + "|")
        for mix, count in cases:
            costs: list[list[Cost]] = [[] for _ in ways]
            for number in range(rounds):
                texts = inputs(mix, count, number)
                for found, (server, at_once) in zip(costs, ways, strict=True):
                    found.append(server.cost(texts, at_once=at_once))
            print(_line(mix, count, [_median(each) for each in costs]), flush=True)


def _median(costs: list[Cost]) -> Cost:
    return Cost(statistics.median(each.wall for each in costs), statistics.median(each.cpu for each in costs))


def _line(mix: str, count: int, costs: list[Cost]) -> str:
    rates = [f"{count / each.wall:.1f} ({each.cpu / count * 1000:.1f})" for each in costs]
    ratios = [f"{each.wall / costs[0].wall:.1f}" for each in costs[1:]]
    return f"| {count} {mix} | {' | '.join([*rates, *ratios])} |"
