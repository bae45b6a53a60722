"""CPU time of a server and its children: where others compute too, it differs less from run to run than time."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def of_tree(pid: int) -> float | None:
    """Seconds that a process and its living descendants have computed so far; None where there is no /proc."""
    if not PROC.is_dir():
        return None
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                # The name of the command stands in brackets, and may have any character in it.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            number = int(entry.name)
            parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])
    found, members = 0, {pid}
    while len(members) > found:
        found = len(members)
        members |= {number for number, parent in parents.items() if parent in members}
    return sum(ticks.get(number, 0) for number in members) / os.sysconf("SC_CLK_TCK")
