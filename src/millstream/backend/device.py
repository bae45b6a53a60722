"""The device of this process and its memory. MLX's default device is process-wide: it is set once, here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from millstream.backend.kernels.compiled import keep_kernels
from millstream.backend.kernels.cpu_kernels import compiled_in, keep_cpu_kernels
from millstream.backend.kernels.fusing import fusing

MEMINFO = Path("/proc/meminfo")
REUSED = 10
"""MLX may hold the tenth part of a GPU's memory for reuse, unless another limit is given."""
SPARED = 20
"""CUDA itself needs memory too, for graphs and kernels: the twentieth part, as MLX reckons."""


@dataclass(frozen=True, slots=True)
class Device:
    """`kind` is cpu, metal or cuda."""

    kind: str
    name: str
    memory_bytes: int

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"


def use_device(kind: str | None, kernel_dir: Path | None = None) -> None:
    """With `cpu`, keep the whole process off the GPU. Each engine calls this before it makes its stream. `kernel_dir`:
    the folder in which compiled kernels outlive the process."""
    if kind == "cpu":
        mx.set_default_device(mx.cpu)
    if kernel_dir is None:
        return
    device = current_device()
    if device.is_cpu:
        fusing.use(compiled_in(keep_cpu_kernels(kernel_dir)))
    elif device.kind == "cuda":
        keep_kernels(kernel_dir)


def current_device() -> Device:
    if mx.default_device() == mx.Device(mx.DeviceType.cpu, 0):
        return Device("cpu", str(mx.device_info(mx.cpu).get("device_name", "CPU")), _ram())
    info = mx.device_info()
    kind = "metal" if mx.metal.is_available() else "cuda"
    memory = info.get("memory_size") or info.get("total_memory") or _ram()
    return Device(kind, str(info.get("device_name", kind)), int(memory))


def available_bytes(device: Device) -> int:
    """Memory that a model may still take. What MLX holds for reuse is available; other programs are considered as far
    as the system reports them: on Metal it does not."""
    if device.is_cpu and MEMINFO.exists():
        line = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024 + mx.get_cache_memory()
    if device.kind == "cuda" and (free := mx.device_info().get("free_memory")) is not None:
        return int(free) + mx.get_cache_memory()
    return device.memory_bytes - mx.get_active_memory()


def free_bytes(device: Device) -> int:
    """Memory that is free for KV caches now. Beyond its recommended working set, Metal swaps."""
    if device.kind != "metal":
        return available_bytes(device)
    recommended = mx.device_info().get("max_recommended_working_set_size")
    return int(recommended or device.memory_bytes) - mx.get_active_memory()


def limit_reuse(device: Device, cache_limit: int | None) -> None:
    """Have MLX hold no more freed memory than that for reuse. By itself it would hold all that a GPU has, and give
    nothing back when other programs fill it: then an allocation fails, or steps take seconds (seen on an H200)."""
    if cache_limit is None and not device.is_cpu:
        cache_limit = device.memory_bytes // REUSED
    if cache_limit is not None:
        mx.set_cache_limit(cache_limit)
    if device.kind == "cuda":
        ours = mx.get_active_memory() + free_bytes(device)
        mx.set_memory_limit(max(0, ours - device.memory_bytes // SPARED))


def _ram() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
