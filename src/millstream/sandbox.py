"""Sandbox for child processes that handle untrusted input: a minimal environment, and limits that the kernel enforces.

Chat templates, grammars and media come from strangers. The server handles them in child processes set up here.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys

_INHERITED = frozenset(
    {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "HOME", "TMPDIR"}
)


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module in a new interpreter.

    `-P` keeps Python from importing modules from the folder that the server was started in.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Returns the environment variables that a child needs to start. API keys and other secrets are left out."""
    return {name: value for name, value in os.environ.items() if name in _INHERITED}


def signal_group(group: int, number: signal.Signals) -> None:
    """Signals a child that was started in a session of its own, and its forks."""
    # Without members there is no group; macOS forbids to signal one whose members have all ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def limit(*, memory: int, cpu_seconds: int | None = None, stack: int | None = None) -> None:
    """Limits CPU time, memory and stack of the calling process, and disables core dumps. Call it in the child.

    Memory and stack are limited on Linux only: macOS does not enforce those limits.
    """
    _set_limit(resource.RLIMIT_CORE, 0)
    if cpu_seconds is not None:
        _set_limit(resource.RLIMIT_CPU, cpu_seconds)
    if sys.platform == "linux":
        _set_limit(resource.RLIMIT_AS, memory)
        if stack is not None:
            _set_limit(resource.RLIMIT_STACK, stack)


def _set_limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
