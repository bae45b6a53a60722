"""The memory of this machine's device, asked without importing MLX."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from millstream.models.estimate import DeviceKind

METAL_SHARE = 0.75
"""Of a Mac's memory, what Metal recommends to use at most, roughly."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_ASK_SECONDS = 10


def memory_bytes(device: DeviceKind) -> int | None:
    """What models may use at most. None if the system does not say."""
    if device == "cuda":
        return _gpu_memory()
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device == "metal":
        return int(ram * METAL_SHARE)
    return min(ram, _container_limit() or ram)


def _container_limit() -> int | None:
    try:
        text = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _gpu_memory() -> int | None:
    """Of the first GPU: MLX uses that one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        result = subprocess.run(
            [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = result.stdout.strip().splitlines()[:1]
    return int(first[0]) * 2**20 if result.returncode == 0 and first and first[0].strip().isdecimal() else None
