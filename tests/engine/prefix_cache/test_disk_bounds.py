"""The disk tier under load: it never exceeds its budget, and a kill at any moment corrupts nothing."""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from millstream.engine.prefix_cache.disk.block_file import StoredRun, read_header
from millstream.engine.prefix_cache.disk.folder import write_file
from millstream.engine.prefix_cache.disk.store import DiskStore
from support import writing_child
from support.forked import Forked
from support.runs import STAMP, seeded_run

KILLS, FEW = 50, 20
"""With `--whole`, and without."""


def bytes_used(folder: Path) -> int:
    """The size of the files as `du` counts it. Exact only while the folder does not change."""
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder))


def recreated(run: StoredRun) -> StoredRun:
    facts = json.loads(run.extra)
    return seeded_run(facts["seed"], parent=run.parent, size=facts["size"], tokens=facts["tokens"])


def is_queued(store: DiskStore, run: StoredRun) -> bool:
    """True if it is queued or being written."""
    return store.holds_all([run.keys[-1]]) and store.find_first([run.keys[-1]]) is None


def read_all(store: DiskStore, folder: Path) -> int:
    """Read every file and compare it with its expected contents; returns how many there were."""
    results: queue.Queue[list[StoredRun] | None] = queue.Queue()
    names = sorted(folder.glob("*.safetensors"))
    for name in names:
        found = store.find_first([read_header(name).keys[-1]])
        assert found is not None, "a file that the store has not indexed"
        store.read_soon([found[1]], results.put)
    for _ in names:
        runs = results.get(timeout=60)
        assert runs is not None, "a file that cannot be read"
        assert runs == [recreated(run) for run in runs]
    return len(names)


def test_writes_never_exceed_the_budget(tmp_path: Path) -> None:
    budget = 300_000
    sizes: list[int] = []
    results: list[list[StoredRun] | None] = []
    asked = 0

    def watched(path: Path, buffers: Sequence[bytes]) -> None:
        # Only this thread changes the folder, so its size is exact here, where it is largest.
        write_file(path, buffers)
        sizes.append(bytes_used(tmp_path))

    source = random.Random(5)
    store = DiskStore(tmp_path, budget, STAMP, queue_bytes=200_000, write=watched)
    store.open()
    runs: list[StoredRun] = []
    for seed in range(200):
        parent = source.choice(runs).keys[-1] if runs and source.random() < 0.5 else None
        run = seeded_run(seed, parent=parent, size=source.randrange(100, 90_000))
        runs = [*runs[-20:], run]
        store.write_soon(run, run.keys)
        old = source.choice(runs)
        pieces = store.match(old.keys)
        if pieces:
            if source.random() < 0.2:
                with suppress(FileNotFoundError):
                    os.truncate(tmp_path / pieces[0].name, 50)
            store.read_soon(pieces, results.append)
            asked += 1
        if seed % 90 == 89:
            store.clear()
        while seed % 2 == 0 and (len(results) < asked or is_queued(store, run)):
            time.sleep(0.001)
    store.close(30)
    stats = store.stats()
    assert len(sizes) >= stats.written > 40
    assert stats.failed == 0
    assert len(results) == asked, "each read gets one result"
    found = [run for result in results if result is not None for run in result]
    assert len(found) == stats.hits > 10
    assert found == [recreated(run) for run in found]
    assert budget * 0.8 < max(sizes) <= budget
    assert bytes_used(tmp_path) <= stats.bytes <= budget
    assert stats.damaged > 0
    du_bytes = int(subprocess.check_output(["du", "-sk", tmp_path]).split()[0]) * 1024
    assert du_bytes <= budget + (64 << 10), "more than the files and their folder"


def write_and_die(writers: Forked, seed: int, writes: int, share: float) -> None:
    """Kill a process after `writes` writes and a share of the next; with 0, while it opens its store."""
    writers.begin(str(seed))
    begun = [time.monotonic()]
    while len(begun) <= writes:
        writers.hear("write")
        begun.append(time.monotonic())
    time.sleep(share * (begun[-1] - begun[-2] if writes else 0.02))
    writers.kill()


def test_killed_at_random_moments(tmp_path: Path, whole: bool) -> None:
    kills = KILLS if whole else FEW
    source = random.Random(11)
    interrupted = served = 0
    with Forked("support.writing_child", str(tmp_path)) as writers:
        for kill in range(kills):
            # Every eighth dies while it opens its store, or soon after.
            writes = source.randrange(1, 12) if kill % 8 else 0
            write_and_die(writers, kill * 100_000, writes, source.uniform(0, 1.2))
            interrupted += any(tmp_path.glob("*.tmp"))
            store = DiskStore(tmp_path, writing_child.BUDGET, STAMP)
            store.open()
            assert not list(tmp_path.glob("*.tmp"))
            assert bytes_used(tmp_path) <= store.stats().bytes <= writing_child.BUDGET
            served += read_all(store, tmp_path)
            assert store.stats().damaged == 0, "a file got its name before it was complete"
            store.close(5)
    assert interrupted > 0 and served > kills
    print(f"{interrupted} kills hit a write; {served} files were read after kills")
