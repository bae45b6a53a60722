"""What a device has free for KV caches: as each kind of device reports it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from millstream.backend.device import Device, current_device, free_bytes


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
