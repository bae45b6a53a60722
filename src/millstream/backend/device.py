"""What this machine computes on, and how much memory it has. The default device is process-wide: set once, here."""

from __future__ import annotations

import os
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Device:
    """`kind` is cpu, metal or cuda."""

    kind: str
    name: str
    memory_bytes: int

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"


def current_device() -> Device:
    if mx.default_device() == mx.Device(mx.DeviceType.cpu, 0):
        return Device("cpu", str(mx.device_info(mx.cpu).get("device_name", "CPU")), _ram())
    info = mx.device_info()
    kind = "metal" if mx.metal.is_available() else "cuda"
    memory = info.get("memory_size") or info.get("total_memory") or _ram()
    return Device(kind, str(info.get("device_name", kind)), int(memory))


def available_bytes(device: Device) -> int:
    """Memory that a model may still take: what MLX already holds is gone, and the system keeps its share."""
    if device.is_cpu:
        return (
            os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
        )
    return device.memory_bytes - mx.get_active_memory()


def _ram() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
