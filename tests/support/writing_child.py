"""Processes that write runs into a store as fast as they can, until they are killed: one for each seed on stdin."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from millstream.engine.prefix_cache.disk.folder import write_file
from millstream.engine.prefix_cache.disk.store import DiskStore
from support.forked import fork_for_each, say
from support.runs import STAMP, seeded_run

BUDGET = 400_000


def write_on(folder: Path, seed: int) -> None:
    numbers = itertools.count(1)

    def said(path: Path, pieces: Sequence[bytes]) -> None:
        say("write", next(numbers))
        write_file(path, pieces)

    store = DiskStore(folder, BUDGET, STAMP, queue_bytes=100_000, write=said)
    store.open()
    say("open")
    parent = None
    for number in itertools.count(seed):
        run = seeded_run(number, parent=parent, size=1000 + number * 7919 % 60_000)
        parent = None if number % 5 == 0 else run.keys[-1]
        while not store.holds_all([run.keys[-1]]):
            store.write_soon(run, run.keys)
        store.match(run.keys)
        if number % 97 == 0:
            store.clear()


if __name__ == "__main__":
    fork_for_each(lambda line: write_on(Path(sys.argv[1]), int(line)))
