"""The store of the disk tier: runs are read back byte for byte, also after a restart, and damage is a miss."""

from __future__ import annotations

import errno
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.engine.prefix_cache.disk.block_file import StoredRun, pack
from millstream.engine.prefix_cache.disk.folder import StoreBusy, bytes_on_disk, file_name, write_file
from millstream.engine.prefix_cache.disk.index import Piece
from millstream.engine.prefix_cache.disk.store import DiskStore
from millstream.errors import EngineGone
from support.runs import STAMP, seeded_run

MB = 1 << 20


@contextmanager
def opened(
    folder: Path, budget: int = 50 * MB, stamp: str = STAMP, write: Callable[[Path, Sequence[bytes]], None] = write_file
) -> Iterator[DiskStore]:
    store = DiskStore(folder, budget, stamp, write=write)
    store.open()
    try:
        yield store
    finally:
        store.close(20)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)


def write(store: DiskStore, run: StoredRun) -> None:
    before = store.stats().written
    store.write_soon(run, run.keys)
    until(lambda: store.stats().written > before)


def read(store: DiskStore, pieces: Sequence[Piece]) -> list[StoredRun] | None:
    results: queue.Queue[list[StoredRun] | None] = queue.Queue()
    store.read_soon(pieces, results.put)
    return results.get(timeout=60)


def fetch(store: DiskStore, run: StoredRun) -> list[StoredRun] | None:
    pieces = store.match(run.keys)
    return read(store, pieces) if pieces else None


def files(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} - {"lock"}


def path_of(folder: Path, run: StoredRun) -> Path:
    return folder / file_name(run.keys)


def test_a_prefix_matches_after_a_restart(tmp_path: Path) -> None:
    first = seeded_run(1)
    second = seeded_run(2, parent=first.keys[-1], tokens=10)
    other = seeded_run(3)
    folder = tmp_path / "made" / "here"
    with opened(folder) as store:
        assert store.match(first.keys) == ()
        for run in (first, second, other):
            write(store, run)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(path_of(folder, first).stat().st_mode) == 0o600
    with opened(folder) as store:
        assert store.stats().files == 3
        pieces = store.match([*first.keys, *second.keys[:2]])
        assert pieces == (Piece(file_name(first.keys), 0, 3, 3), Piece(file_name(second.keys), 0, 2, 3))
        assert read(store, pieces) == [first, second]
        assert store.find_first(["none", second.keys[1], second.keys[-1]]) == (
            2,
            Piece(file_name(second.keys), 0, 3, 3),
        )
        assert store.find_first([second.keys[1]]) is None
        assert store.holds_all(second.keys[:2]) and not store.holds_all([second.keys[1], seeded_run(9).keys[0]])
        assert store.stats().hits == 2


def test_equal_tokens_with_other_media_do_not_match(tmp_path: Path) -> None:
    cat = replace(seeded_run(1), contents=((5, "cat"),))
    dog = replace(cat, contents=((5, "dog"),))
    with opened(tmp_path) as store:
        write(store, cat)
        assert [piece.count for piece in store.match(dog.keys)] == [1]
        assert [piece.count for piece in store.match(cat.keys)] == [3]


def test_files_of_another_model_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as store:
        write(store, seeded_run(1))
    with opened(tmp_path, stamp="another") as store:
        assert store.match(seeded_run(1).keys) == ()
        assert files(tmp_path) == set()
        assert store.stats().damaged == 1
    assert "another model" in caplog.text


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    names = ["model.safetensors", "kv-12.safetensors", "notes.tmp", f"kv-{'a' * 40}-1.safetensors.bak"]
    for name in names:
        (tmp_path / name).write_text("a user's own")
    with opened(tmp_path, budget=1) as store:
        store.clear()
    assert files(tmp_path) == set(names)


def test_a_second_server_cannot_open_the_folder(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        second = DiskStore(tmp_path, MB, STAMP)
        with pytest.raises(StoreBusy, match="another server"):
            second.open()
        # A store that could not be opened acts as an empty one.
        second.write_soon(seeded_run(2), seeded_run(2).keys)
        assert fetch(second, seeded_run(2)) is None
        assert read(second, [Piece("kv", 0, 1, 1)]) is None
        assert second.stats().dropped == 1
        second.close(1)
        write(store, seeded_run(1))
        assert fetch(store, seeded_run(1)) == [seeded_run(1)]
    with opened(tmp_path) as store:
        assert fetch(store, seeded_run(1)) == [seeded_run(1)]


def test_a_folder_that_cannot_be_created_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        DiskStore(tmp_path / "file", MB, STAMP).open()


def damages(path: Path) -> dict[str, Callable[[], object]]:
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")

    def flip(offset: int) -> Callable[[], object]:
        return lambda: path.write_bytes(data[:offset] + bytes([data[offset] ^ 16]) + data[offset + 1 :])

    def replace_by(make: Callable[[], object]) -> Callable[[], object]:
        return lambda: (path.unlink(), make())

    return {
        "length": flip(2),
        "digest": flip(40),
        "stamp": flip(data.index(STAMP.encode()) + 3),
        "tokens": flip(data.index(b'"tokens"') + 13),
        "offsets": flip(data.index(b"data_offsets") + 18),
        "first byte of data": flip(header),
        "last byte": flip(len(data) - 1),
        "empty": lambda: path.write_bytes(b""),
        "truncated header": lambda: os.truncate(path, header // 2),
        "truncated data": lambda: os.truncate(path, len(data) - 1),
        "longer": lambda: path.write_bytes(data + b"\0"),
        "another run": lambda: path.write_bytes(b"".join(pack(seeded_run(77), STAMP))),
        "foreign": lambda: path.write_bytes(b"".join(pack(seeded_run(1), "another"))),
        "folder": replace_by(path.mkdir),
        "link": replace_by(lambda: path.symlink_to("/dev/zero")),
        "pipe": replace_by(lambda: os.mkfifo(path)),
    }


DAMAGES = [
    "length",
    "digest",
    "stamp",
    "tokens",
    "offsets",
    "first byte of data",
    "last byte",
    "empty",
    "truncated header",
    "truncated data",
    "longer",
    "another run",
    "foreign",
    "folder",
    "link",
    "pipe",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_detected_and_removed(damage: str, tmp_path: Path) -> None:
    run, other = seeded_run(1), seeded_run(2)
    path = path_of(tmp_path, run)
    with opened(tmp_path) as store:
        write(store, run)
        write(store, other)
        damage_by = damages(path)
        assert list(damage_by) == DAMAGES
        damage_by[damage]()
        # While the server runs: a miss. The file is removed and can be written again.
        assert fetch(store, run) is None
        until(lambda: not os.path.lexists(path))
        assert (store.stats().damaged, store.stats().files) == (1, 1)
        assert not store.match(run.keys)
        write(store, run)
        assert fetch(store, run) == [run]
        damage_by[damage]()
    # After a restart: detected by its header, or when it is read.
    with opened(tmp_path) as store:
        assert fetch(store, run) is None
        until(lambda: not os.path.lexists(path))
        assert store.stats().damaged == 1
        assert fetch(store, other) == [other]


def test_truncated_files_are_removed(tmp_path: Path) -> None:
    run = seeded_run(1, size=100)
    data = b"".join(pack(run, STAMP))
    for end in range(0, len(data), 41):
        path_of(tmp_path, run).write_bytes(data[:end])
        with opened(tmp_path) as store:
            assert store.stats().files == 0
        assert files(tmp_path) == set()


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user who is not root: root may read everything")
def test_a_file_that_may_not_be_read_is_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, seeded_run(1))
        path_of(tmp_path, seeded_run(1)).chmod(0)
        assert fetch(store, seeded_run(1)) is None
        until(lambda: not files(tmp_path))


def test_an_io_error_is_a_miss_and_removes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        write(store, seeded_run(1))

        def broken(path: Path) -> object:
            raise OSError(errno.EIO, "the disk is broken")

        monkeypatch.setattr("millstream.engine.prefix_cache.disk.folder.open_regular", broken)
        assert fetch(store, seeded_run(1)) is None
        until(lambda: not files(tmp_path))


def test_too_many_open_files_do_not_remove_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        write(store, seeded_run(1))

        def broken(path: Path) -> object:
            raise OSError(errno.EMFILE, "too many open files")

        with monkeypatch.context() as patch:
            patch.setattr("millstream.engine.prefix_cache.disk.folder.open_regular", broken)
            assert fetch(store, seeded_run(1)) is None
        assert fetch(store, seeded_run(1)) == [seeded_run(1)]


def test_a_folder_with_the_name_of_a_file_is_left_alone(tmp_path: Path) -> None:
    run = seeded_run(1)
    (path_of(tmp_path, run) / "inside").mkdir(parents=True)
    with opened(tmp_path) as store:
        store.write_soon(run, run.keys)
        until(lambda: store.stats().failed == 1)
        write(store, seeded_run(2))
        assert fetch(store, seeded_run(2)) == [seeded_run(2)]
    assert files(tmp_path) == {file_name(run.keys), file_name(seeded_run(2).keys)}


def test_a_missing_file_is_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, seeded_run(1))
        path_of(tmp_path, seeded_run(1)).unlink()
        assert fetch(store, seeded_run(1)) is None
        assert (store.stats().files, store.stats().damaged) == (0, 0)
        write(store, seeded_run(1))
        assert fetch(store, seeded_run(1)) == [seeded_run(1)]


def test_a_full_disk_is_logged_once_and_writes_recover(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = True

    def limited(path: Path, buffers: Sequence[bytes]) -> None:
        write_file(path, buffers[:1])
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.unlink()
        write_file(path, buffers)

    with opened(tmp_path, write=limited) as store:
        for seed in range(5):
            store.write_soon(seeded_run(seed), seeded_run(seed).keys)
        until(lambda: store.stats().failed == 5)
        assert files(tmp_path) == set()
        assert not store.holds_all([seeded_run(1).keys[0]])
        assert caplog.text.count("No space left") == 1
        full = False
        write(store, seeded_run(1))
        assert fetch(store, seeded_run(1)) == [seeded_run(1)]
        full = True
        store.write_soon(seeded_run(7), seeded_run(7).keys)
        until(lambda: store.stats().failed == 6)
        assert caplog.text.count("No space left") == 2
        assert fetch(store, seeded_run(1)) == [seeded_run(1)]


def test_a_file_that_cannot_be_removed_stops_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = seeded_run(1, size=3000), seeded_run(2, size=3000)
    with opened(tmp_path, budget=4096) as store:
        write(store, one)

        def refuse(path: Path, missing_ok: bool = False) -> None:
            raise PermissionError(errno.EPERM, "not allowed")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse)
            store.write_soon(two, two.keys)
            until(lambda: store.stats().dropped == 1)
        assert files(tmp_path) == {file_name(one.keys)}


class Gate:
    """A disk whose writes block until `go` is set."""

    def __init__(self) -> None:
        self.busy = threading.Event()
        self.go = threading.Event()

    def __call__(self, path: Path, buffers: Sequence[bytes]) -> None:
        self.busy.set()
        assert self.go.wait(20)
        write_file(path, buffers)


def test_the_queue_is_bounded_by_bytes(tmp_path: Path) -> None:
    gate = Gate()
    store = DiskStore(tmp_path, 50 * MB, STAMP, queue_bytes=5000, write=gate)
    store.open()
    runs = [seeded_run(seed, size=2000) for seed in range(4)]
    for run in runs:
        store.write_soon(run, run.keys)
        store.write_soon(run, run.keys)
    assert store.stats().dropped == 4
    assert [store.holds_all([run.keys[0]]) for run in runs] == [True, True, False, False]
    assert store.match(runs[0].keys) == (), "it is not on disk yet"
    gate.go.set()
    store.close(20)
    assert files(tmp_path) == {file_name(run.keys) for run in runs[:2]}


def test_clear_drops_stored_queued_and_current_writes(tmp_path: Path) -> None:
    gate = Gate()
    with opened(tmp_path, write=gate) as store:
        gate.go.set()
        write(store, seeded_run(1))
        gate.go.clear()
        gate.busy.clear()
        store.write_soon(seeded_run(2), seeded_run(2).keys)
        store.write_soon(seeded_run(3), seeded_run(3).keys)
        assert gate.busy.wait(20)
        store.clear()
        assert not any(store.match(seeded_run(seed).keys) for seed in (1, 2, 3))
        assert store.stats().bytes == 0
        gate.go.set()
        until(lambda: files(tmp_path) == set())
        write(store, seeded_run(3))
        assert fetch(store, seeded_run(3)) == [seeded_run(3)]
        assert store.stats().files == 1
    assert files(tmp_path) == {file_name(seeded_run(3).keys)}


def test_close_waits_no_longer_than_its_timeout(tmp_path: Path) -> None:
    gate = Gate()
    store = DiskStore(tmp_path, 50 * MB, STAMP, write=gate)
    store.open()
    for seed in range(3):
        store.write_soon(seeded_run(seed), seeded_run(seed).keys)
    assert gate.busy.wait(20)
    threading.Timer(0.5, gate.go.set).start()
    store.close(0.1)
    assert store.stats().dropped == 2
    store.write_soon(seeded_run(9), seeded_run(9).keys)
    assert read(store, [Piece("kv", 0, 1, 1)]) is None
    store.close(0.1)
    with opened(tmp_path) as again:
        assert again.stats().files == 1


def test_a_hung_disk_keeps_the_lock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    store = DiskStore(tmp_path, 50 * MB, STAMP, write=gate)
    store.open()
    store.write_soon(seeded_run(1), seeded_run(1).keys)
    assert gate.busy.wait(20)
    store.close(0)
    assert "does not respond" in caplog.text
    with pytest.raises(StoreBusy):
        DiskStore(tmp_path, MB, STAMP).open()
    gate.go.set()


def test_a_read_for_an_engine_that_has_ended_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, seeded_run(1))

        def gone(runs: list[StoredRun] | None) -> None:
            raise EngineGone("stopped")

        store.read_soon(store.match(seeded_run(1).keys), gone)
        assert fetch(store, seeded_run(1)) == [seeded_run(1)]


def test_a_run_with_wrong_keys_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as store:
        store.write_soon(seeded_run(1), seeded_run(2).keys)
        until(lambda: store.stats().failed == 1)
        assert files(tmp_path) == set()
        assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_the_lru_order_survives_a_restart(tmp_path: Path) -> None:
    runs = [seeded_run(seed, size=3000) for seed in range(4)]
    tail = seeded_run(9, size=3000, parent=runs[0].keys[-1])
    size = bytes_on_disk(sum(map(len, pack(runs[0], STAMP))))
    with opened(tmp_path, budget=5 * size) as store:
        for run in (*runs, tail):
            write(store, run)
        store.match([*runs[0].keys, *tail.keys])
        store.match(runs[2].keys)
    for budget, left in ((3, [runs[0], runs[2], tail]), (2, [runs[0], runs[2]])):
        with opened(tmp_path, budget=budget * size) as store:
            assert files(tmp_path) == {file_name(run.keys) for run in left}
            assert store.stats().bytes <= budget * size


def test_a_writer_that_crashes_drops_queued_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never should. If it does, nothing waits for it, and files on disk are still served."""
    gate = Gate()
    with opened(tmp_path, write=gate) as store:
        gate.go.set()
        write(store, seeded_run(1))

        def broken(run: StoredRun, stamp: str) -> list[bytes]:
            raise RuntimeError("a defect")

        ended = threading.Event()
        monkeypatch.setattr(threading, "excepthook", lambda args: ended.set())
        monkeypatch.setattr("millstream.engine.prefix_cache.disk.store.pack", broken)
        store.write_soon(seeded_run(2), seeded_run(2).keys)
        assert ended.wait(20)
        store.write_soon(seeded_run(3), seeded_run(3).keys)
        assert not store.holds_all([seeded_run(2).keys[0]]) and not store.holds_all([seeded_run(3).keys[0]])
        assert store.stats().dropped == 1
        assert fetch(store, seeded_run(1)) == [seeded_run(1)]
