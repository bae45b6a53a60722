"""The disk tier under pressure: never over its budget, and killed at any moment without a wrong byte after it."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import millstream
from millstream.engine.block_file import StoredRun, read_header
from millstream.engine.disk_folder import write_file
from millstream.engine.disk_store import DiskStore
from support import writing_child
from support.runs import STAMP, seeded_run

KILLS = 50


def bytes_used(folder: Path) -> int:
    """What `du` would say of the files. Only while nobody changes the folder: else it counts both old and new."""
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder))


def made_again(run: StoredRun) -> StoredRun:
    facts = json.loads(run.extra)
    return seeded_run(facts["seed"], parent=run.parent, size=facts["size"], tokens=facts["tokens"])


def read_all(store: DiskStore, folder: Path) -> int:
    """Read every file that is there, and compare it with what must be in it. How many there were."""
    answers: queue.Queue[list[StoredRun] | None] = queue.Queue()
    names = sorted(folder.glob("*.safetensors"))
    for name in names:
        piece = store.find(read_header(name).keys[-1])
        assert piece is not None, "a file that the store does not know"
        store.read_soon([piece], answers.put)
    for _ in names:
        runs = answers.get(timeout=20)
        assert runs is not None, "a file that cannot be read"
        assert runs == [made_again(run) for run in runs]
    return len(names)


def test_never_over_the_budget_at_any_moment_of_a_write(tmp_path: Path) -> None:
    budget = 300_000
    most: list[int] = []

    def watched(path: Path, pieces: Sequence[bytes]) -> None:
        # Only this thread changes the folder, so it can be measured here, when the most is in it.
        write_file(path, pieces)
        most.append(bytes_used(tmp_path))

    source = random.Random(5)
    store = DiskStore(tmp_path, budget, STAMP, queue_bytes=200_000, write=watched)
    store.open()
    runs: list[StoredRun] = []
    for seed in range(400):
        parent = source.choice(runs).keys[-1] if runs and source.random() < 0.5 else None
        run = seeded_run(seed, parent=parent, size=source.randrange(100, 90_000))
        runs = [*runs[-20:], run]
        store.write_soon(run, run.keys)
        old = source.choice(runs)
        pieces = store.match(old.keys)
        if pieces and source.random() < 0.2:
            os.truncate(tmp_path / pieces[0].name, 50) if (tmp_path / pieces[0].name).exists() else None
            store.read_soon(pieces, lambda answer: None)
        if seed % 90 == 89:
            store.clear()
        if source.random() < 0.3:
            time.sleep(0.003)
    store.close(30)
    stats = store.stats()
    assert len(most) == stats.written + stats.failed > 50
    assert budget * 0.8 < max(most) <= budget
    assert bytes_used(tmp_path) <= stats.bytes <= budget
    assert stats.damaged > 0
    assert int(subprocess.check_output(["du", "-sk", tmp_path]).split()[0]) * 1024 <= budget + (64 << 10), (
        "the folder too"
    )


def test_killed_at_random_moments(tmp_path: Path) -> None:
    source = random.Random(11)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(millstream.__file__).parents[1]), str(Path(__file__).parents[1])])
    }
    interrupted = served = 0
    for kill in range(KILLS):
        command = [sys.executable, "-S", "-m", "support.writing_child", str(tmp_path), str(kill * 100_000)]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        assert child.stdout is not None
        with child.stdout as said:
            if kill % 8:
                assert said.readline() == b"open\n"
                time.sleep(source.uniform(0, 0.12))
            else:
                time.sleep(source.uniform(0.05, 0.3))  # while it starts, scans or has just begun
            child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, "it ended by itself"
        interrupted += any(tmp_path.glob("*.tmp"))
        store = DiskStore(tmp_path, writing_child.BUDGET, STAMP)
        store.open()
        assert not list(tmp_path.glob("*.tmp"))
        assert bytes_used(tmp_path) <= store.stats().bytes <= writing_child.BUDGET
        served += read_all(store, tmp_path)
        assert store.stats().damaged == 0, "a file had its name before all of it was there"
        store.close(5)
    assert interrupted > 0 and served > KILLS
    print(f"{interrupted} kills hit a write; {served} files were read after kills")
