"""Serve many requests of very different lengths in little memory, and print as JSON what became of them.

python bench/memory_pressure.py --model random-1b
python bench/memory_pressure.py --model random-tiny --requests 40 --longest 4000 --kv-tokens 14000 --concurrency 16

`--memory` is set to the weights plus `--kv-tokens` tokens of KV cache: by default just enough for one request of the
longest kind. Every request should be answered, or refused with a clear 400, and memory should never exceed its budget.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

import servers
from millstream.bench.report import percentile
from millstream.engine.generation.kv_budget import tokens_for_row
from millstream.models.estimate import Estimate, estimate, expected_device
from millstream.models.source import ModelSource
from models import find

SHORTEST = 10


def with_context(folder: Path, context: int) -> Path:
    """The same model with room for `context` tokens: random weights have no context that they were trained for."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("max_position_embeddings", 0) >= context:
        return folder
    copy = Path(tempfile.gettempdir()) / f"{folder.name}-{context}"
    copy.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.name != "config.json" and not (copy / file.name).exists():
            (copy / file.name).symlink_to(file.resolve())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    return copy


def bodies(model: str, count: int, longest: int, outputs: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of token ids, their lengths spread evenly over the orders of magnitude."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        length = round(math.exp(draw.uniform(math.log(SHORTEST), math.log(longest - outputs))))
        prompt = [draw.randrange(10, 1000) for _ in range(length)]
        found.append({"model": model, "prompt": prompt, "max_tokens": draw.randint(1, outputs), "ignore_eos": True})
    return found


async def ask(client: httpx.AsyncClient, body: dict[str, Any], slots: asyncio.Semaphore) -> tuple[str, float, int]:
    """Returns what became of a request, its seconds and its output tokens."""
    async with slots:
        started = time.monotonic()
        try:
            reply = await client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            return f"failed: {type(error).__name__}", time.monotonic() - started, 0
        seconds = time.monotonic() - started
        if reply.status_code == 400:
            return "refused", seconds, 0
        if reply.status_code != 200:
            return f"failed: {reply.status_code} {reply.text[:200]}", seconds, 0
        tokens = reply.json()["usage"]["completion_tokens"]
        return ("answered" if tokens == body["max_tokens"] else "failed: cut short"), seconds, tokens


async def watch(client: httpx.AsyncClient, samples: list[int]) -> None:
    while True:
        cards = (await client.get("/v1/models")).json()["data"]
        samples.append(sum(card["memory_bytes"] for card in cards))
        await asyncio.sleep(0.05)


async def measure(url: str, wanted: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    slots, samples = asyncio.Semaphore(concurrency), [0]
    limits = httpx.Limits(max_connections=concurrency + 2)
    async with httpx.AsyncClient(base_url=url, timeout=3600, limits=limits) as client:
        watcher = asyncio.create_task(watch(client, samples))
        started = time.monotonic()
        results = await asyncio.gather(*(ask(client, body, slots) for body in wanted))
        seconds = time.monotonic() - started
        watcher.cancel()
    times = [each for outcome, each, _ in results if outcome == "answered"]
    return {
        "outcomes": dict(Counter(outcome for outcome, _, _ in results)),
        "seconds": round(seconds, 2),
        "prompt_tokens": sum(len(body["prompt"]) for body in wanted),
        "output_tokens": sum(tokens for _, _, tokens in results),
        "request_ms": {name: percentile(times, share) for name, share in (("p50", 0.5), ("p99", 0.99))},
        "most_memory_bytes": max(samples),
        "memory_samples": len(samples) - 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-1b")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--longest", type=int, default=30_000, help="tokens of the longest request")
    parser.add_argument("--output-tokens", type=int, default=256, help="most output tokens of a request")
    parser.add_argument("--kv-tokens", type=int, help="tokens of KV cache that --memory has room for")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ours", default="", help="more options of the server")
    arguments = parser.parse_args()
    folder = with_context(find(arguments.model), 2 ** math.ceil(math.log2(arguments.longest)))
    sizes: Estimate = estimate(ModelSource(folder.name, "folder", folder), device=expected_device(None), unpack=True)
    # The prefix cache may take a quarter.
    kv_tokens = arguments.kv_tokens or tokens_for_row(arguments.longest) * 4 // 3 + 1
    memory = sizes.weight_bytes + kv_tokens * sizes.kv_bytes_per_token
    options = ("--memory", str(memory), "--queue", str(arguments.requests), *arguments.ours.split())
    wanted = bodies(folder.name, arguments.requests, arguments.longest, arguments.output_tokens, arguments.seed)
    with servers.running("millstream", folder, options) as url:
        report = asyncio.run(measure(url, wanted, arguments.concurrency))
        [card] = httpx.get(f"{url}/v1/models").json()["data"]
    report |= {"memory": memory, "weight_bytes": sizes.weight_bytes, "kv_tokens": kv_tokens}
    report |= {"reserved_bytes": card["reserved_bytes"], "context_length": card["context_length"]}
    fine = set(report["outcomes"]) <= {"answered", "refused"} and report["most_memory_bytes"] <= memory
    print(json.dumps({"fine": fine, **report}, indent=2))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
