"""The disk tier: what was written is found again, byte for byte, also by a later server, and nothing else is."""

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


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def write(store: DiskStore, run: StoredRun) -> None:
    before = store.stats().written
    store.write_soon(run, run.keys)
    until(lambda: store.stats().written > before)


def read(store: DiskStore, pieces: Sequence[Piece]) -> list[StoredRun] | None:
    answers: queue.Queue[list[StoredRun] | None] = queue.Queue()
    store.read_soon(pieces, answers.put)
    return answers.get(timeout=20)


def fetch(store: DiskStore, run: StoredRun) -> list[StoredRun] | None:
    pieces = store.match(run.keys)
    return read(store, pieces) if pieces else None


def files(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} - {"lock"}


def path_of(folder: Path, run: StoredRun) -> Path:
    return folder / file_name(run.keys)


def test_a_chain_is_found_again_by_the_next_server(tmp_path: Path) -> None:
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


def test_equal_tokens_with_other_contents_are_another_chain(tmp_path: Path) -> None:
    cat = replace(seeded_run(1), contents=((5, "cat"),))
    dog = replace(cat, contents=((5, "dog"),))
    with opened(tmp_path) as store:
        write(store, cat)
        assert [piece.count for piece in store.match(dog.keys)] == [1]
        assert [piece.count for piece in store.match(cat.keys)] == [3]


def test_a_server_of_another_model_finds_nothing_and_removes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        write(store, seeded_run(1))
    with opened(tmp_path, stamp="another") as store:
        assert store.match(seeded_run(1).keys) == ()
        assert files(tmp_path) == set()
        assert store.stats().damaged == 1
    assert "another model" in caplog.text


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    names = ["model.safetensors", "kv-12.safetensors", "notes.tmp", f"kv-{'a' * 40}-1.safetensors.bak"]
    for name in names:
        (tmp_path / name).write_text("a person's own")
    with opened(tmp_path, budget=1) as store:
        store.clear()
    assert files(tmp_path) == set(names)


def test_a_second_server_is_told_and_the_first_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        second = DiskStore(tmp_path, MB, STAMP)
        with pytest.raises(StoreBusy, match="another server"):
            second.open()
        # Whoever goes on with it has an empty store.
        second.write_soon(seeded_run(2), seeded_run(2).keys)
        assert fetch(second, seeded_run(2)) is None
        assert read(second, [Piece("kv", 0, 1, 1)]) is None
        assert second.stats().dropped == 1
        second.close(1)
        write(store, seeded_run(1))
        assert fetch(store, seeded_run(1)) == [seeded_run(1)]
    with opened(tmp_path) as store:
        assert fetch(store, seeded_run(1)) == [seeded_run(1)]


def test_a_folder_that_cannot_be_made_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        DiskStore(tmp_path / "file", MB, STAMP).open()


def damages(path: Path) -> dict[str, Callable[[], object]]:
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")

    def flip(at: int) -> Callable[[], object]:
        return lambda: path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])

    def instead(make: Callable[[], object]) -> Callable[[], object]:
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
        "cut in the header": lambda: os.truncate(path, header // 2),
        "cut in the data": lambda: os.truncate(path, len(data) - 1),
        "longer": lambda: path.write_bytes(data + b"\0"),
        "another run": lambda: path.write_bytes(b"".join(pack(seeded_run(77), STAMP))),
        "foreign": lambda: path.write_bytes(b"".join(pack(seeded_run(1), "another"))),
        "folder": instead(path.mkdir),
        "link": instead(lambda: path.symlink_to("/dev/zero")),
        "pipe": instead(lambda: os.mkfifo(path)),
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
    "cut in the header",
    "cut in the data",
    "longer",
    "another run",
    "foreign",
    "folder",
    "link",
    "pipe",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_removed(damage: str, tmp_path: Path) -> None:
    run, other = seeded_run(1), seeded_run(2)
    path = path_of(tmp_path, run)
    with opened(tmp_path) as store:
        write(store, run)
        write(store, other)
        hurt = damages(path)
        assert list(hurt) == DAMAGES
        hurt[damage]()
        # While the server runs: a miss, and the file is gone; then it can be written anew.
        assert fetch(store, run) is None
        until(lambda: not os.path.lexists(path))
        assert (store.stats().damaged, store.stats().files) == (1, 1)
        assert not store.match(run.keys)
        write(store, run)
        assert fetch(store, run) == [run]
        hurt[damage]()
    # At the next start, by the header or when it is read.
    with opened(tmp_path) as store:
        assert fetch(store, run) is None
        until(lambda: not os.path.lexists(path))
        assert store.stats().damaged == 1
        assert fetch(store, other) == [other]


def test_cuts_at_many_points(tmp_path: Path) -> None:
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


def test_an_io_error_while_reading_is_a_miss_and_the_file_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        write(store, seeded_run(1))

        def broken(path: Path) -> object:
            raise OSError(errno.EIO, "the disk is broken")

        monkeypatch.setattr("millstream.engine.prefix_cache.disk.folder.open_plain", broken)
        assert fetch(store, seeded_run(1)) is None
        until(lambda: not files(tmp_path))


def test_too_many_open_files_are_no_reason_to_lose_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        write(store, seeded_run(1))

        def broken(path: Path) -> object:
            raise OSError(errno.EMFILE, "too many open files")

        with monkeypatch.context() as patch:
            patch.setattr("millstream.engine.prefix_cache.disk.folder.open_plain", broken)
            assert fetch(store, seeded_run(1)) is None
        assert fetch(store, seeded_run(1)) == [seeded_run(1)]


def test_a_folder_with_things_in_it_stays_and_the_store_goes_on(tmp_path: Path) -> None:
    run = seeded_run(1)
    (path_of(tmp_path, run) / "inside").mkdir(parents=True)
    with opened(tmp_path) as store:
        store.write_soon(run, run.keys)
        until(lambda: store.stats().failed == 1)
        write(store, seeded_run(2))
        assert fetch(store, seeded_run(2)) == [seeded_run(2)]
    assert files(tmp_path) == {file_name(run.keys), file_name(seeded_run(2).keys)}


def test_a_file_that_somebody_removed_is_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, seeded_run(1))
        path_of(tmp_path, seeded_run(1)).unlink()
        assert fetch(store, seeded_run(1)) is None
        assert (store.stats().files, store.stats().damaged) == (0, 0)
        write(store, seeded_run(1))
        assert fetch(store, seeded_run(1)) == [seeded_run(1)]


def test_a_full_disk_is_said_once_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = True

    def limited(path: Path, pieces: Sequence[bytes]) -> None:
        write_file(path, pieces[:1])
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.unlink()
        write_file(path, pieces)

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
    """A disk that writes nothing until it is told."""

    def __init__(self) -> None:
        self.busy = threading.Event()
        self.go = threading.Event()

    def __call__(self, path: Path, pieces: Sequence[bytes]) -> None:
        self.busy.set()
        assert self.go.wait(20)
        write_file(path, pieces)


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


def test_clear_forgets_what_is_there_what_waits_and_what_is_being_written(tmp_path: Path) -> None:
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


def test_close_waits_no_longer_than_it_may(tmp_path: Path) -> None:
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


def test_a_disk_that_hangs_keeps_the_lock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    store = DiskStore(tmp_path, 50 * MB, STAMP, write=gate)
    store.open()
    store.write_soon(seeded_run(1), seeded_run(1).keys)
    assert gate.busy.wait(20)
    store.close(0)
    assert "does not answer" in caplog.text
    with pytest.raises(StoreBusy):
        DiskStore(tmp_path, MB, STAMP).open()
    gate.go.set()


def test_an_answer_for_an_engine_that_has_ended_hurts_nobody(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, seeded_run(1))

        def gone(runs: list[StoredRun] | None) -> None:
            raise EngineGone("stopped")

        store.read_soon(store.match(seeded_run(1).keys), gone)
        assert fetch(store, seeded_run(1)) == [seeded_run(1)]


def test_keys_that_are_not_the_runs_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as store:
        store.write_soon(seeded_run(1), seeded_run(2).keys)
        until(lambda: store.stats().failed == 1)
        assert files(tmp_path) == set()
        assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_what_is_used_outlives_what_is_not_also_over_a_restart(tmp_path: Path) -> None:
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


def test_a_writer_that_ends_promises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never should. If it does, nobody waits for it, and what is on disk is still served."""
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
