"""For child processes that work on a stranger's data: a bare environment, and limits that the system enforces."""

from __future__ import annotations

import os
import resource
import sys

_PASSED = frozenset(
    {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "HOME", "TMPDIR"}
)


def command(module: str, *arguments: str) -> list[str]:
    """Runs a module in a new interpreter. -P: nothing is imported from the folder that the server was started in."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """What a child needs to start, and no more: the server's keys are none of its business."""
    return {name: value for name, value in os.environ.items() if name in _PASSED}


def limit(*, memory: int, cpu_seconds: int | None = None, stack: int | None = None) -> None:
    """In the child: bound its memory and stack (Linux only: macOS does not enforce it) and its CPU time, and leave no
    core."""
    _lower(resource.RLIMIT_CORE, 0)
    if cpu_seconds is not None:
        _lower(resource.RLIMIT_CPU, cpu_seconds)
    if sys.platform == "linux":
        _lower(resource.RLIMIT_AS, memory)
        if stack is not None:
            _lower(resource.RLIMIT_STACK, stack)


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
