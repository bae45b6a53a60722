"""Measure the prefix cache: time to first token of a long prompt, cold and warm, and the hits of a multi-turn chat.

python bench/prefix.py --model random-mid
python bench/prefix.py --model random-1b --long-words 750
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import servers
from millstream.bench.report import milliseconds, percentile
from models import find

REPEAT = 5


@dataclass
class Turn:
    first: float
    prompt: int
    cached: int
    text: str


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Turn:
    """Send a streaming chat request and read its usage."""
    started = time.monotonic()
    first, usage, text = 0.0, {}, ""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                first = first or (time.monotonic() - started if piece else 0.0)
                text += piece
    details = usage.get("prompt_tokens_details") or {}
    return Turn(first, usage.get("prompt_tokens", 0), details.get("cached_tokens") or 0, text)


async def measure(url: str, model: str, words: int, turns: int) -> tuple[list[float], list[float], int, int]:
    """Times to first token, cold and warm; then prompt tokens of a chat, and how many were cached."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        cold, warm = [], []
        common: dict[str, Any] = {"model": model, "max_tokens": 4}
        await ask(client, {**common, "messages": [{"role": "user", "content": " ".join(["x"] * words)}]})
        for number in range(REPEAT):
            body = long_prompt(model, words, number)
            cold.append((await ask(client, body)).first)
            warm.append((await ask(client, body)).first)
        messages = [{"role": "system", "content": "You are a miller. " * 20}]
        prompt = cached = 0
        for number in range(turns):
            messages.append({"role": "user", "content": f"Tell me more about part {number} of the mill."})
            turn = await ask(client, {"model": model, "max_tokens": 40, "messages": messages})
            messages.append({"role": "assistant", "content": turn.text})
            prompt, cached = prompt + turn.prompt, cached + turn.cached
    return cold, warm, prompt, cached


def long_prompt(model: str, words: int, number: int) -> dict[str, Any]:
    text = " ".join(f"word{number}{index % 7}" for index in range(words))
    return {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": text}]}


async def first_tokens(url: str, words: int, *, until_on_disk: bool) -> list[Turn]:
    """Send each long prompt once. With `until_on_disk`, wait until the server has written its prefix cache."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await ask(client, long_prompt("", words, REPEAT))
        turns = [await ask(client, long_prompt("", words, number)) for number in range(REPEAT)]
        before = -1
        while until_on_disk:
            await asyncio.sleep(2)
            now = (await client.get("/v1/models")).json()["data"][0]["prefix_cache_disk_bytes"]
            if now == before > 0:
                break
            before = now
    return turns


def after_a_restart(folder: Path, words: int, ours: str) -> None:
    """Millstream only: cold, and with a second server that reuses the cache on disk."""
    with tempfile.TemporaryDirectory() as cache:
        extra = (*ours.split(), "--prefix-cache-disk", "20GiB", "--cache-dir", cache)
        with servers.running("millstream", folder, extra) as url:
            cold = asyncio.run(first_tokens(url, words, until_on_disk=True))
        with servers.running("millstream", folder, extra) as url:
            warm = asyncio.run(first_tokens(url, words, until_on_disk=False))
    slow, quick = (percentile([turn.first for turn in turns], 0.5) for turns in (cold, warm))
    found, of = sum(turn.cached for turn in warm), sum(turn.prompt for turn in warm)
    print(f"millstream, disk: cold {milliseconds(slow)}, after a restart {milliseconds(quick)}")
    print(f"millstream, disk: {found} of {of} prompt tokens from the cache")
    print(f"millstream, disk: after a restart / cold = {quick / slow:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-mid")
    parser.add_argument("--servers", type=lambda text: text.split(","), default=["millstream", "mlx-lm"])
    parser.add_argument("--long-words", type=int, default=670, help="about 4,000 tokens of the random models")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--ours", default="")
    arguments = parser.parse_args()
    folder = find(arguments.model)
    for server, url, name in servers.each(arguments.servers, folder, arguments.ours):
        cold, warm, prompt, cached = asyncio.run(measure(url, name, arguments.long_words, arguments.turns))
        slow, quick = percentile(cold, 0.5), percentile(warm, 0.5)
        print(f"{server}: first token of a long prompt: cold {milliseconds(slow)}, again {milliseconds(quick)}")
        if slow and quick:
            print(f"{server}: again / cold = {quick / slow:.3f}")
        print(f"{server}: chat of {arguments.turns} turns: {cached} of {prompt} prompt tokens from the cache")
    if "millstream" in arguments.servers:
        after_a_restart(folder, arguments.long_words, arguments.ours)
    return 0


if __name__ == "__main__":
    sys.exit(main())
