"""Embeddings per second: requests of many inputs, against mlx-vlm's own server and a loop over single inputs.

    python bench/embeddings.py FOLDER                        an embedding model, such as all-MiniLM-L6-v2
    python bench/embeddings.py bert-base                     random weights of a real shape (also: minilm, qwen3-0.6b)
    python bench/embeddings.py FOLDER --chat random-tiny     a chat's gaps, alone and beside 2,000 embeddings

Both servers run during the whole measurement, and requests go to them in turn: what else the machine does slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx

import models
import servers
from encoder_shapes import SHAPES, make_encoder
from millstream.bench.client import Sample, stream
from millstream.bench.load import Load, request_body, words
from millstream.bench.report import milliseconds, percentile

MIXES: dict[str, Callable[[random.Random], int]] = {
    "mixed": lambda draw: min(200, 4 + int(draw.lognormvariate(2.8, 1.0))),
    "short": lambda draw: draw.randint(4, 12),
    "long": lambda draw: draw.randint(120, 200),
}
"""Words per input."""
CASES = (("mixed", 1), ("mixed", 8), ("mixed", 64), ("mixed", 256), ("short", 64), ("long", 64))
CHAT_STREAMS = 2
TOGETHER = 0.001
"""Seconds between chunks of one read."""


def inputs(mix: str, count: int, seed: int) -> list[str]:
    draw = random.Random(f"{mix} {count} {seed}")
    return [words(draw, MIXES[mix](draw)) for _ in range(count)]


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


async def _chat(url: str, chat_model: str, embedder: str, count: int) -> tuple[list[float], list[float], float]:
    """Gaps of a chat alone, gaps beside embeddings, and how long these took."""
    load = Load(url=url, model=chat_model, prompt_words=20, output_tokens=300, ignore_eos=True)
    path = "/v1/chat/completions"

    async def talk(number: int) -> Sample:
        return await stream(load.target, path, request_body(load, number))

    await asyncio.gather(*(talk(number) for number in range(CHAT_STREAMS)))
    alone = [await talk(10 + number) for number in range(3)]
    beside: list[Sample] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        started = time.perf_counter()
        body = {"model": embedder, "input": inputs("mixed", count, 0)}
        embedding = asyncio.create_task(client.post("/v1/embeddings", json=body))
        while not embedding.done():
            beside.append(await talk(100 + len(beside)))
        (await embedding).raise_for_status()
        elapsed = time.perf_counter() - started
    return _gaps(alone), _gaps(beside), elapsed


def _gaps(samples: list[Sample]) -> list[float]:
    """Tokens that arrive together count as one."""
    return [gap for sample in samples for gap in sample.gaps if gap > TOGETHER]


def chat(folder: Path, chat_folder: Path, count: int) -> None:
    with servers.running("millstream", chat_folder, ("--isolation", "process"), more=(folder,)) as url:
        alone, beside, elapsed = asyncio.run(_chat(url, chat_folder.name, folder.name, count))
    median = statistics.median(alone)
    print(f"a chat's gaps alone: median {milliseconds(median)}, p99 {milliseconds(percentile(alone, 0.99))}")
    worst = percentile(beside, 0.99)
    middle = milliseconds(statistics.median(beside))
    print(f"beside {count} embeddings ({elapsed:.1f} s): median {middle}, p99 {milliseconds(worst)}")
    if worst is not None:
        print(f"p99 beside them is {worst / median:.1f} times the median alone")


def _cases(text: str) -> list[tuple[str, int]]:
    pairs = (case.split(":") for case in text.split(","))
    return [(mix, int(count)) for mix, count in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a folder, or one of {', '.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", type=_cases, default=list(CASES), help="such as mixed:64,short:8")
    parser.add_argument(
        "--peer-preload", metavar="LIBRARY", help="a BLAS for mlx-vlm's server, which brings none on Linux"
    )
    parser.add_argument("--no-peer", action="store_true", help="without mlx-vlm's server")
    parser.add_argument("--chat", metavar="MODEL", help="measure this chat model's gaps instead")
    parser.add_argument("--count", type=int, default=2000, help="embeddings beside the chat")
    arguments = parser.parse_args()
    folder = make_encoder(arguments.model) if arguments.model in SHAPES else Path(arguments.model)
    if arguments.chat:
        chat(folder, models.find(arguments.chat), arguments.count)
    else:
        compare(folder, arguments.cases, arguments.rounds, not arguments.no_peer, arguments.peer_preload)
    return 0


if __name__ == "__main__":
    sys.exit(main())
