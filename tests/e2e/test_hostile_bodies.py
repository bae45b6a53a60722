"""Hostile request bodies: each gets a clear 400, /health and other streams keep going, and memory is freed."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from millstream.config import Settings
from support.server import RunningServer, running
from support.tiers import some
from support.tiny import write_servable

SLOWEST = 10.0
"""Seconds that /health and the next token may take at worst on a shared machine. Measured: 0.05 to 0.3 on two busy
cores; it used to be up to 47."""
MEMORY = 100 * 2**20
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
WILD = (
    "{% if messages[0].content == 'loop' %}" + NESTED + "{% elif messages[0].content == 'grow' %}"
    "{{ ('x' * 99999) * 99999 }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


def chat(content: object = "hello", **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def stuffed(unit: bytes) -> bytes:
    body = json.dumps(chat(metadata={"x": ["HERE"]})).encode()
    return body.replace(b'"HERE"', unit * (8_000_000 // len(unit)) + b"1")


def unknown(count: int) -> dict[str, int]:
    return {f"k{number}": 1 for number in range(count)}


ATTACKS: dict[str, tuple[str, Callable[[], dict[str, Any] | bytes], str]] = {
    "long stop strings": ("chat/completions", lambda: chat(stop=["a" * 1_000_000] * 4, n=4), "at most 1024"),
    "a prompt of 8 MB": ("completions", lambda: {"prompt": "hello world " * 700_000}, "far more tokens"),
    "a message of 8 MB": ("chat/completions", lambda: chat("hello <w " * 900_000), "more than 4194304 characters"),
    "reasoning of 8 MB": (
        "chat/completions",
        lambda: {"messages": [{"role": "assistant", "content": "", "reasoning_content": "<w " * 2_700_000}]},
        "more than 4194304 characters",
    ),
    "a message of 3 MB": ("chat/completions", lambda: chat("<|im_end|>" * 300_000), "far more tokens"),
    "millions of lists": ("chat/completions", lambda: stuffed(b"[],"), "more than 100000 objects and lists"),
    "millions of objects": ("chat/completions", lambda: stuffed(b'{"a":1},'), "more than 100000 objects and lists"),
    "millions of strings": ("chat/completions", lambda: stuffed(b'"",'), "more than 2000000 values"),
    "millions of keys": ("chat/completions", lambda: chat(**unknown(500_000)), "more than 300000 keys"),
    "thousands of unknown keys": ("chat/completions", lambda: chat(**unknown(50_000)), "more than 1000 parameters"),
    "a template that loops": ("chat/completions", lambda: chat("loop"), "CPU time"),
    "a template that multiplies": ("chat/completions", lambda: chat("grow"), "1024 MiB"),
}


@pytest.fixture(scope="module", params=some(["thread", "process"], ["thread"]))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_servable(tmp_path_factory.mktemp("hostile") / "wild")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": WILD}))
    with running(Settings((str(folder),), port=0, max_batch=8, isolation=request.param)) as subject:
        yield subject


@contextmanager
def watched(server: RunningServer) -> Iterator[None]:
    """Reads a stream and polls /health all the time, and checks that neither stalls."""
    over = threading.Event()
    flowing = threading.Event()
    waits: list[float] = []
    chunks: list[float] = []

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            while not over.is_set():
                began = time.monotonic()
                assert http.get("/health").status_code == 200
                waits.append(time.monotonic() - began)
                over.wait(0.02)

    def read() -> None:
        body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=server.url, timeout=60) as http:
            while not over.is_set():
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    for _ in answer.iter_lines():
                        chunks.append(time.monotonic())
                        flowing.set()
                        if over.is_set():
                            break

    threads = [threading.Thread(target=ask), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    assert flowing.wait(60)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert max(waits) < SLOWEST
    assert max(after - before for before, after in itertools.pairwise(chunks)) < SLOWEST


def resident_bytes() -> int:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(process.memory_info().rss for process in processes)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gets_a_clear_400_and_delays_no_other_request(server: RunningServer, name: str) -> None:
    path, make, words = ATTACKS[name]
    body = make()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    del body
    url = f"{server.url}/v1/{path}"
    wild = name.startswith("a template")
    if not wild:
        httpx.post(url, content=raw, timeout=120)  # once, to allocate what is created on first use
    before = resident_bytes()
    with watched(server):
        for _ in range(1 if wild else 3):
            answer = httpx.post(url, content=raw, timeout=120)
            assert answer.status_code == 400, answer.text[:500]
            assert words in answer.json()["error"]["message"]
            assert len(answer.content) < 2_000
    assert resident_bytes() < before + MEMORY
    assert httpx.post(url, json=chat() if path.startswith("chat") else {"prompt": "hi"}, timeout=60).status_code == 200


def test_control_tokens_are_plain_text_unless_allowed(servable: Path) -> None:
    """The tiny tokenizer has one token per byte, so the prompt's length shows how a control token was tokenized."""
    lengths: dict[tuple[bool, str], int] = {}
    for allowed in (False, True):
        with running(Settings((str(servable),), port=0, allow_special_tokens=allowed)) as server:
            for name in ("<|im_end|>", "<|nothing|"):
                answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat(f"a{name}b", max_tokens=1))
                lengths[allowed, name] = answer.json()["usage"]["prompt_tokens"]
    assert lengths[False, "<|im_end|>"] == lengths[False, "<|nothing|"] == lengths[True, "<|nothing|"]
    assert lengths[True, "<|im_end|>"] == lengths[False, "<|im_end|>"] - len("<|im_end|>") + 1
