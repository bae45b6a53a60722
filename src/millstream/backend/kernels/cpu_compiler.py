"""Compiles a kernel for MLX on a CPU: once for all processes, and with a precompiled header.

Run as a program in place of the compiler (see `cpu_kernels`): imports the standard library alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HEADER = Path("mlx/backend/cpu/compiled_preamble.h")
"""All that a kernel includes. It takes most of the time."""


def compile_kernel(real: str, folder: Path, arguments: list[str]) -> int:
    """`arguments` are options, the source, -o and the library. Returns the compiler's exit status."""
    source, library = Path(arguments[-3]), Path(arguments[-1])
    options = arguments[:-3]
    made = folder / "compiled" / f"{_key(options, source.read_bytes())}.so"
    made.parent.mkdir(exist_ok=True)
    with _locked(made.with_suffix(".lock")):
        if not made.exists():  # else another process was faster
            headers = _precompiled(real, folder, options)
            if code := _compile([real, *headers, *options, str(source)], made):
                return code
    shutil.copyfile(made, library)
    return 0


def _precompiled(real: str, folder: Path, options: list[str]) -> list[str]:
    """Options with which the compiler finds the header compiled; none if it cannot compile it. It ignores one that
    other options made."""
    found = next((place / HEADER for place in map(Path, options) if (place / HEADER).is_file()), None)
    if found is None:
        return []
    place = folder / "headers" / _key(_state(Path(real)), _state(found), options)
    made = (place / HEADER).with_suffix(".h.gch")
    made.parent.mkdir(parents=True, exist_ok=True)
    with _locked(place / "lock"):
        command = [real, *(option for option in options if option != "-shared"), "-x", "c++-header", str(found)]
        return ["-I", str(place)] if made.exists() or _compile(command, made) == 0 else []


def _compile(command: list[str], made: Path) -> int:
    """All of it, or nothing."""
    draft = made.with_suffix(f".{os.getpid()}.draft")
    try:
        command = [*command, "-o", str(draft)]
        code = os.waitstatus_to_exitcode(os.waitpid(os.spawnv(os.P_NOWAIT, command[0], command), 0)[1])
        if code == 0:
            draft.replace(made)
        return code
    finally:
        draft.unlink(missing_ok=True)


def _key(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _state(path: Path) -> tuple[str, int, int]:
    """Changes with the file's content."""
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(compile_kernel(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
