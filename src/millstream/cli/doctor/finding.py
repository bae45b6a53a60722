"""What a check of `millstream doctor` has found."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    status: Status
    detail: str
    fix: str = ""
    """A command, or what to do in a few words; empty if nothing is to be done."""


def ok(check: str, detail: str) -> Finding:
    return Finding(check, "ok", detail)


def warning(check: str, detail: str, fix: str) -> Finding:
    return Finding(check, "warning", detail, fix)


def problem(check: str, detail: str, fix: str) -> Finding:
    return Finding(check, "problem", detail, fix)


def install(*requirements: str) -> str:
    """The command that installs packages into this very Python, not into the first one on PATH."""
    return _pip("install", *requirements)


def uninstall(*names: str) -> str:
    return _pip("uninstall", *names)


def _pip(action: str, *words: str) -> str:
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is not None:
        return f"{python} -m pip {action} {shlex.join(words)}"
    if shutil.which("uv") is not None:
        return f"uv pip {action} --python {python} {shlex.join(words)}"
    return f"{python} -m ensurepip && {python} -m pip {action} {shlex.join(words)}"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
