"""What a check of `millstream doctor` has found."""

from __future__ import annotations

import importlib.util
import shlex
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
    return f"{_pip()} install {shlex.join(requirements)}"


def uninstall(*names: str) -> str:
    return f"{_pip()} uninstall {shlex.join(names)}"


def _pip() -> str:
    python = shlex.quote(sys.executable)
    has_pip = importlib.util.find_spec("pip") is not None
    return f"{python} -m pip" if has_pip else f"uv pip --python {python}"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
