"""Many requests in little memory: all are answered as with plenty of it, or refused before any work."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.config import Settings
from millstream.models.estimate import estimate
from millstream.models.source import ModelSource
from support.server import running
from support.tiny import write_servable

PATIENCE = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pressure")
    return write_servable(root / "tiny", num_hidden_layers=2, max_position_embeddings=4096)


def requests() -> list[dict[str, Any]]:
    draw = random.Random(2)
    found = []
    for number in range(14):
        prompt = [draw.randrange(1, 250) for _ in range(draw.choice([3, 50, 60, 150, 400]))]
        sampling = {"temperature": number % 2, "seed": number}
        found.append({"prompt": prompt, "max_tokens": draw.choice([5, 90]), "ignore_eos": True, **sampling})
    return found


def answers(url: str, bodies: list[dict[str, Any]]) -> list[tuple[str, dict[str, int]]]:
    def ask(body: dict[str, Any]) -> tuple[str, dict[str, int]]:
        reply = httpx.post(f"{url}/v1/completions", json={"model": "tiny", **body}, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        return reply.json()["choices"][0]["text"], {name: usage[name] for name in ("prompt_tokens", "total_tokens")}

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))


def test_mixed_requests_in_little_memory(folder: Path) -> None:
    bodies = requests()
    with running(Settings(models=(str(folder),), port=0, isolation="thread")) as server:
        expected = answers(server.url, bodies)
    sizes = estimate(ModelSource("tiny", "folder", folder), device="cpu", unpack=True)
    memory = sizes.weight_bytes + 4500 * sizes.kv_bytes_per_token
    with running(Settings(models=(str(folder),), port=0, isolation="thread", memory=memory)) as server:
        samples: list[int] = []
        done = threading.Event()

        def sample() -> None:
            while not done.wait(0.02):
                [card] = httpx.get(f"{server.url}/v1/models", timeout=PATIENCE).json()["data"]
                samples.append(card["memory_bytes"])

        watcher = threading.Thread(target=sample)
        watcher.start()
        try:
            assert answers(server.url, bodies) == expected
        finally:
            done.set()
            watcher.join()
        assert samples and sizes.weight_bytes < max(samples) <= memory
        long = {"model": "tiny", "prompt": [1] * 4000, "max_tokens": 1}
        refused = httpx.post(f"{server.url}/v1/completions", json=long, timeout=PATIENCE)
        message = refused.json()["error"]["message"]
        assert refused.status_code == 400
        assert "The model's own limit is 4096 tokens" in message and "--memory" in message
