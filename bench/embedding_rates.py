"""Inputs per second over HTTP: requests of many inputs, against mlx-vlm's own server and a loop over single inputs.

Both servers run during the whole measurement, and requests go to them in turn: what else the machine does slows both.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

import servers
from embedding_inputs import inputs


class Server:
    def __init__(self, name: str, url: str, model: str) -> None:
        self.name = name
        self._model = model
        self._client = httpx.Client(base_url=url, timeout=600)

    def embed(self, texts: list[str]) -> None:
        body = {"model": self._model, "input": texts} if self._model else {"input": texts}
        reply = self._client.post("/v1/embeddings", json=body)
        reply.raise_for_status()
        assert len(reply.json()["data"]) == len(texts)

    def seconds(self, texts: list[str]) -> float:
        started = time.perf_counter()
        self.embed(texts)
        return time.perf_counter() - started

    def seconds_one_by_one(self, texts: list[str]) -> float:
        started = time.perf_counter()
        for text in texts:
            self.embed([text])
        return time.perf_counter() - started


def compare(folder: Path, cases: list[tuple[str, int]], rounds: int, peer: bool, preload: str | None) -> None:
    with ExitStack() as stack:
        ours = Server("millstream", stack.enter_context(servers.running("millstream", folder)), "")
        theirs = None
        if peer and servers.command("mlx-vlm-embeddings", folder, 0) is not None:
            changes = {"LD_PRELOAD": preload} if preload else {}
            url = stack.enter_context(servers.running("mlx-vlm-embeddings", folder, environment=changes))
            theirs = Server("mlx-vlm", url, str(folder))
        everyone = [server for server in (ours, theirs) if server is not None]
        for server in everyone:
            server.embed(inputs("mixed", 8, -1))
        print("inputs per second (median of rounds)\n")
        print("| inputs | one request | one by one | mlx-vlm | against one by one | against mlx-vlm |")
        print("|---|---|---|---|---|---|")
        for mix, count in cases:
            times: dict[str, list[float]] = {}
            for number in range(rounds):
                texts = inputs(mix, count, number)
                for server in everyone:
                    times.setdefault(server.name, []).append(server.seconds(texts))
                times.setdefault("single", []).append(ours.seconds_one_by_one(texts))
            print(
                _line(mix, count, {name: count / statistics.median(each) for name, each in times.items()}), flush=True
            )


def _line(mix: str, count: int, rates: dict[str, float]) -> str:
    ours, single, theirs = rates["millstream"], rates["single"], rates.get("mlx-vlm")
    others = ("-", "-") if theirs is None else (f"{theirs:.0f}", f"{ours / theirs:.1f}")
    return f"| {count} {mix} | {ours:.0f} | {single:.0f} | {others[0]} | {ours / single:.1f} | {others[1]} |"
