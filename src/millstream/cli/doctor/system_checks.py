"""Memory, containers, disk space and limits of this machine."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from millstream.backend.open_files import WANTED
from millstream.cli.doctor.finding import Finding, gigabytes, ok, problem, warning
from millstream.models.demo import user_cache_dir
from millstream.models.nearby import hub_cache

LITTLE_MEMORY = 2e9
LITTLE_DISK = 10e9
NO_DISK = 1e9
FEW_FILES = 4096
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
MEMINFO = Path("/proc/meminfo")


def check_system() -> Iterator[Finding]:
    yield from check_memory(_total_memory(), _available_memory(), container_limit())
    for name, folder, variable in (
        ("model cache", hub_cache(), "HF_HUB_CACHE"),
        ("demo cache", user_cache_dir(), "MILLSTREAM_CACHE"),
    ):
        yield check_folder(name, folder, variable)
    yield from _open_files()


def check_memory(total: int, available: int | None, limit: int | None) -> Iterator[Finding]:
    if limit is not None and limit < 0.95 * total:
        yield warning(
            "memory",
            f"This container may use {gigabytes(limit)} of the machine's {gigabytes(total)}, but models are planned "
            "for the machine's memory.",
            f"millstream serve --memory {max(1, int(0.9 * limit / 1e9))}GB",
        )
    elif available is not None and available < LITTLE_MEMORY:
        yield warning("memory", f"Only {gigabytes(available)} of {gigabytes(total)} are free.", "close other programs")
    else:
        free = "" if available is None else f", {gigabytes(available)} free"
        yield ok("memory", f"{gigabytes(total)}{free}")


def container_limit() -> int | None:
    """What the control group of this process may use; None for no limit."""
    for file in CGROUP_LIMITS:
        try:
            text = file.read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() else None
    return None


def check_folder(name: str, folder: Path, variable: str) -> Finding:
    elsewhere = f"export {variable}=/a/folder/with/space"
    base = folder
    while not base.exists() and base != base.parent:
        base = base.parent
    try:
        with tempfile.TemporaryFile(dir=base):
            free = shutil.disk_usage(base).free
    except OSError as error:
        return problem(name, f"{folder} cannot be written: {error.strerror or error}.", elsewhere)
    text = f"{folder}, {gigabytes(free)} free"
    if free < NO_DISK:
        return problem(name, f"The disk is full: {text}.", elsewhere)
    if free < LITTLE_DISK:
        return warning(name, f"There is little space for models: {text}.", elsewhere)
    return ok(name, text)


def _open_files() -> Iterator[Finding]:
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        yield warning(
            "open files", f"At most {hard} files may be open, and each connection is one.", f"ulimit -Hn {WANTED}"
        )
    else:
        yield ok("open files", f"{soft} now, up to {'any number' if hard == resource.RLIM_INFINITY else hard}")


def _total_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available_memory() -> int | None:
    """None where the system does not say it."""
    if not MEMINFO.exists():
        return None
    line = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024
