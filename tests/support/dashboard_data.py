"""A made-up server for the dashboard: JSON as of /v1/models and /server/…, with states that a test cannot bring about
on a real one in a short time."""

from __future__ import annotations

import math
import time
from typing import Any

INTERVAL = 5.0
GB = 10**9


class MadeUpServer:
    """`models`, `running` and `recent` may be changed; the history is a calm hour of every model."""

    def __init__(self, *names: str) -> None:
        self.started = time.time() - 7500
        self.models = [model(name) for name in names]
        self.running: list[dict[str, Any]] = []
        self.recent: list[dict[str, Any]] = []
        self.is_down = False

    def answer(self, path: str, since: float = 0.0) -> dict[str, Any]:
        if path == "/v1/models":
            return {"object": "list", "data": self.models}
        if path == "/server/status":
            memory = {"budget_bytes": 24 * GB, "used_bytes": sum(each["memory_bytes"] for each in self.models)}
            process = {"pid": 4242, "rss_bytes": int(1.3 * GB)}
            return {"version": "0.1.0", "uptime": time.time() - self.started, "memory": memory, "process": process}
        if path == "/server/requests":
            return {"running": self.running, "recent": self.recent}
        assert path == "/server/history", path
        return self._history(since)

    def _history(self, since: float) -> dict[str, Any]:
        now = time.time()
        first = math.floor((now - 3600) / INTERVAL) + 1
        times = [tick * INTERVAL for tick in range(first, int(now / INTERVAL) + 1) if tick * INTERVAL > since]
        models = {each["id"]: _figures(times, number) for number, each in enumerate(self.models)}
        return {"interval": INTERVAL, "now": now, "times": times, "models": models}


def model(name: str, **changes: Any) -> dict[str, Any]:
    """A model that is ready and idle, but for `changes`."""
    ready = {
        "id": name,
        "object": "model",
        "created": 1,
        "owned_by": "millstream",
        "state": "ready",
        "progress": None,
        "error": None,
        "aliases": [],
        "isolation": "thread",
        "pid": 4242,
        "thread": 140021,
        "pinned": False,
        "memory_bytes": 3 * GB,
        "prefix_cache_bytes": GB // 2,
        "prefix_cache_disk_bytes": 0,
        "reserved_bytes": 8 * GB,
        "kv_bytes_per_token": 147456,
        "active": 0,
        "waiting": 0,
        "max_batch": 16,
        "context_length": 32768,
        "restarts": 0,
        "capabilities": ["completion", "tools"],
        "speculation": {
            "drafters": ["grammar", "prompt-lookup"],
            "passes": 90,
            "gain": 1.6,
            "drafts": [
                {"drafter": "grammar", "proposed": 300, "accepted": 290},
                {"drafter": "prompt-lookup", "proposed": 100, "accepted": 10},
            ],
        },
    }
    return {**ready, **changes}


def request(number: int, state: str = "done", **changes: Any) -> dict[str, Any]:
    """A request that began `number` times seven seconds ago."""
    started = time.time() - 7 * number - 3
    spans = {"prepare": 0.012, "queue": 0.1 * (number % 4), "prefill": 0.18, "decode": 1.1 + 0.3 * (number % 3)}
    phases, at = [], started
    for name, seconds in spans.items():
        phases.append({"name": name, "start": at, "end": at + seconds})
        at += seconds
    record = {
        "id": f"req_{number:04}",
        "model": "qwen3-4b",
        "dialect": "openai",
        "endpoint": "/v1/chat/completions",
        "state": state,
        "started": started,
        "phases": phases,
        "first_token": sum(spans.values()) - spans["decode"],
        "total": sum(spans.values()),
        "prompt_tokens": 812 + number,
        "cached_tokens": 640,
        "completion_tokens": 128,
        "drafted_tokens": 80,
        "accepted_tokens": 60,
        "finish_reason": "stop",
        "error": None,
    }
    return {**record, **changes}


def _figures(times: list[float], number: int) -> dict[str, list[float | None]]:
    """Waves, with a pause of some minutes in which nobody asks."""

    def wave(height: float, period: float) -> list[float | None]:
        return [height * (1 + 0.6 * math.sin(at / period + number) + 0.2 * math.sin(at / 11)) for at in times]

    def quiet(values: list[float | None], instead: float | None = None) -> list[float | None]:
        return [instead if at % 1500 < 240 else value for at, value in zip(times, values, strict=True)]

    def whole(values: list[float | None]) -> list[float | None]:
        return [None if value is None else round(value) for value in values]

    return {
        "generated_tokens_per_second": quiet(wave(60 / (number + 1), 90), 0),
        "prompt_tokens_per_second": quiet(wave(700 / (number + 1), 70), 0),
        "active": quiet(whole(wave(4, 90)), 0),
        "waiting": quiet(whole(wave(0.6, 45)), 0),
        "first_token_p50": quiet(wave(0.18 * (number + 1), 80)),
        "first_token_p99": quiet(wave(0.5 * (number + 1), 80)),
        "gap_p50": quiet(wave(0.021 * (number + 1), 75)),
        "gap_p99": quiet(wave(0.04 * (number + 1), 75)),
        "memory_bytes": wave(3 * GB, 900),
        "kv_tokens": whole(wave(9000, 90)),
        "prefix_cache_bytes": wave(GB / 2, 900),
        "cached_share": quiet([0.78 for _ in times]),
        "requests": quiet(whole(wave(3, 90)), 0),
        "failures": [0 for _ in times],
    }
