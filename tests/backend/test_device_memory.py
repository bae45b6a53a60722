"""What a device has free for KV caches: as each kind of device reports it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from millstream.backend.device import Device, available_bytes, current_device, free_bytes, limit_reuse


def test_the_cpu_has_no_more_free_than_there_is() -> None:
    device = Device("cpu", "test", current_device().memory_bytes)
    assert 0 < free_bytes(device) < device.memory_bytes + mx.get_cache_memory()


@pytest.mark.parametrize(
    ("kind", "info", "expected"),
    [
        ("cuda", {"free_memory": 70_000, "total_memory": 90_000}, 70_000 + 500),
        ("metal", {"max_recommended_working_set_size": 60_000, "memory_size": 90_000}, 60_000 - 2000),
        ("metal", {"memory_size": 90_000}, 90_000 - 2000),
    ],
)
def test_a_gpu_reports_what_is_free_or_recommended(
    kind: str, info: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What MLX holds for reuse is free; what it uses is not in CUDA's figure, and must be subtracted from Metal's."""
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 500)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2000)
    assert free_bytes(Device(kind, "test", 90_000)) == expected


@pytest.mark.parametrize(("kind", "expected"), [("cuda", 70_000 + 500), ("metal", 90_000 - 2000)])
def test_what_other_programs_hold_is_not_available_where_the_system_tells(
    kind: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"free_memory": 70_000} if kind == "cuda" else {"max_recommended_working_set_size": 60_000}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 500)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2000)
    assert available_bytes(Device(kind, "test", 90_000)) == expected


@pytest.mark.parametrize(
    ("kind", "given", "reuse", "most"),
    [
        ("cuda", None, 9_000, 2000 + 500 + 50_000 - 4_500),
        ("cuda", 700, 700, 2000 + 500 + 50_000 - 4_500),
        ("metal", None, 9_000, None),
        ("cpu", None, None, None),
        ("cpu", 700, 700, None),
    ],
)
def test_mlx_gives_back_what_others_need(
    kind: str, given: int | None, reuse: int | None, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself MLX would hold 0.95 of a GPU's memory, whatever else is on it."""
    limits: dict[str, int] = {}
    monkeypatch.setattr(mx, "set_cache_limit", lambda limit: limits.update(reuse=limit))
    monkeypatch.setattr(mx, "set_memory_limit", lambda limit: limits.update(most=limit))
    monkeypatch.setattr(mx, "device_info", lambda: {"free_memory": 50_000})
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 500)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2000)
    limit_reuse(Device(kind, "test", 90_000), given)
    assert (limits.get("reuse"), limits.get("most")) == (reuse, most)
