"""The NVIDIA driver of this machine, without CUDA."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

_VERSION_FILE = Path("/proc/driver/nvidia/version")
TIMEOUT = 20.0


def driver_version() -> int | None:
    """Its major version; None if there is none."""
    try:
        text = _VERSION_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = _from_tool()
    found = re.search(r"\b(\d{3})\.\d+", text)
    return int(found[1]) if found else None


def _from_tool() -> str:
    """Where the file is hidden, as in some containers and on WSL."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
