"""Processes that write runs into a store as fast as they can, until they are killed: one for each seed on stdin.

They are forked from one that has imported all there is: to start Python takes longer than to write some files.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from millstream.engine.disk_folder import write_file
from millstream.engine.disk_store import DiskStore
from support.runs import STAMP, seeded_run

BUDGET = 400_000


def say(what: str, number: int) -> None:
    """A whole line or none of it: one that is killed leaves no half of one."""
    os.write(1, f"{what} {number}\n".encode())


def write_on(folder: Path, seed: int) -> None:
    say("pid", os.getpid())
    numbers = itertools.count(1)

    def said(path: Path, pieces: Sequence[bytes]) -> None:
        say("write", next(numbers))
        write_file(path, pieces)

    store = DiskStore(folder, BUDGET, STAMP, queue_bytes=100_000, write=said)
    store.open()
    say("open", 1)
    parent = None
    for number in itertools.count(seed):
        run = seeded_run(number, parent=parent, size=1000 + number * 7919 % 60_000)
        parent = None if number % 5 == 0 else run.keys[-1]
        while not store.holds_all([run.keys[-1]]):
            store.write_soon(run, run.keys)
        store.match(run.keys)
        if number % 97 == 0:
            store.clear()


def main(folder: Path) -> None:
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            write_on(folder, int(line))
        _, status = os.waitpid(child, 0)
        say("ended", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
