"""The child processes of this one, by what they do. Other servers of the same test run may have some as well."""

from __future__ import annotations

import psutil

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
