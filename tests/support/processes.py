"""The child processes of this one, by what they do. Other servers of the same test run may have some as well."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

import millstream

ENGINE, TEMPLATE = "millstream.engine.child", "millstream.text.templates.child"


def children(kind: str, pid: int | None = None) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if kind in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def children_find_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine in a process of its own imports the tests' backends, and the package that is tested."""
    places = [Path(__file__).parents[1], Path(millstream.__file__).parents[1]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
