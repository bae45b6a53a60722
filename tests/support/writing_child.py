"""A process that, once told to, writes runs into a store as fast as it can until it is killed."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from millstream.engine.disk_store import DiskStore
from support.runs import STAMP, seeded_run

BUDGET = 400_000


def main(folder: str, seed: int) -> None:
    assert sys.stdin.readline() == "go\n"
    store = DiskStore(Path(folder), BUDGET, STAMP, queue_bytes=100_000)
    store.open()
    print("open", flush=True)
    parent = None
    for number in itertools.count(seed):
        run = seeded_run(number, parent=parent, size=1000 + number * 7919 % 60_000)
        parent = None if number % 5 == 0 else run.keys[-1]
        while not store.holds(run.keys[-1]):
            store.write_soon(run, run.keys)
        store.match(run.keys)
        if number % 97 == 0:
            store.clear()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
