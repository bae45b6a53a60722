"""Stored records: bounded and expiring, in memory and on disk, and what a restart or a damaged disk makes of them."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from millstream.service.ports import RecordStore
from millstream.service.store.files import RecordFiles
from millstream.service.store.folder import RecordFolder
from millstream.service.store.memory import MemoryRecords
from millstream.service.store.record_file import file_name
from millstream.service.store.room import LOOK_SECONDS, FolderRoom
from support.hubs import on_loop

PAGE = 4096


def test_folders_without_room_are_told(tmp_path: Path, worker: Executor) -> None:
    clock, full, looked = Clock(), {"cache"}, threading.Event()

    def has_room(folder: Path) -> bool:
        looked.set()
        return folder.name not in full

    folders = {f"the {name} folder is full": tmp_path / name for name in ("cache", "store")}
    room = FolderRoom(folders, has_room, worker, clock=clock)
    worker.submit(int).result(60)  # after the first look
    assert room.problems() == ["the cache folder is full"]
    full.clear()
    looked.clear()
    assert room.problems() and not looked.is_set(), "it has just looked"
    clock.now += LOOK_SECONDS
    room.problems()
    worker.submit(int).result(60)
    assert room.problems() == []


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def worker() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def on_disk(path: Path, worker: Executor, clock: Clock | None = None, *, max_bytes: int = 10 * PAGE) -> RecordFiles:
    folder = RecordFolder(path, max_bytes=max_bytes, max_age=60.0, clock=clock or Clock())
    return RecordFiles(folder, worker, MemoryRecords(max_bytes=max_bytes, max_age=60.0))


@pytest.fixture(params=["memory", "disk"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def store(kind: str, path: Path, worker: Executor, clock: Clock) -> RecordStore:
    """With room for ten records of 3,000 bytes."""
    if kind == "memory":
        return MemoryRecords(max_bytes=30_000, max_age=60.0, clock=clock)
    return on_disk(path, worker, clock)


@on_loop
async def test_put_get_replace_delete(kind: str, tmp_path: Path, worker: Executor) -> None:
    records = store(kind, tmp_path, worker, Clock())
    assert await records.get("a") is None and not await records.delete("a")
    await records.put("a", b"one")
    await records.put("b", b"")
    assert (await records.get("a"), await records.get("b")) == (b"one", b"")
    await records.put("a", b"two")
    assert await records.get("a") == b"two"
    assert await records.delete("a") and not await records.delete("a")
    assert (await records.get("a"), await records.get("b")) == (None, b"")


@on_loop
async def test_records_expire(kind: str, tmp_path: Path, worker: Executor) -> None:
    clock = Clock()
    records = store(kind, tmp_path, worker, clock)
    await records.put("a", b"one")
    await records.put("b", b"two")
    clock.now += 59
    assert await records.get("a") == b"one"  # being used does not make it younger
    clock.now += 2
    assert await records.get("a") is None and not await records.delete("b")
    assert not names(tmp_path)


@on_loop
async def test_the_least_recently_used_give_way(kind: str, tmp_path: Path, worker: Executor) -> None:
    records = store(kind, tmp_path, worker, Clock())
    for number in range(10):
        await records.put(str(number), b"x" * 3000)
    assert await records.get("0") is not None
    for number in range(10, 12):
        await records.put(str(number), b"x" * 3000)
    left = [number for number in range(12) if await records.get(str(number)) is not None]
    assert left == [0, 3, 4, 5, 6, 7, 8, 9, 10, 11]


@on_loop
async def test_a_record_larger_than_the_store_drives_out_no_other(kind: str, tmp_path: Path, worker: Executor) -> None:
    records = store(kind, tmp_path, worker, Clock())
    await records.put("small", b"x")
    await records.put("large", b"small so far")
    await records.put("large", b"x" * 50_000)
    assert (await records.get("small"), await records.get("large")) == (b"x", None)


@on_loop
async def test_a_restart_finds_them_in_their_order(tmp_path: Path, worker: Executor) -> None:
    clock = Clock()
    records = on_disk(tmp_path, worker, clock)
    for number in range(5):
        await records.put(str(number), f"record {number}".encode())
        os.utime(tmp_path / file_name(str(number)), (clock.now + number, clock.now + number))
    assert await records.get("1") == b"record 1"
    again = on_disk(tmp_path, worker, clock, max_bytes=3 * PAGE)
    left = [number for number in range(5) if await again.get(str(number)) is not None]
    assert left == [1, 3, 4]
    clock.now += 61
    on_disk(tmp_path, worker, clock)
    await again.get("")  # after the scan
    assert not names(tmp_path)


@pytest.mark.parametrize("key", ["../../etc/passwd", "/tmp/x", "a/b", "", "nul\0", "\ud800", "x" * 10_000])
def test_no_key_is_a_path(key: str, tmp_path: Path, worker: Executor) -> None:
    async def both() -> tuple[bytes | None, bytes | None]:
        records = on_disk(tmp_path / "inner", worker)
        await records.put(key, b"here")
        return await records.get(key), await on_disk(tmp_path / "inner", worker).get(key)

    (tmp_path / "inner").mkdir()
    assert asyncio.run(both()) == (b"here", b"here")
    assert [path.name for path in tmp_path.rglob("*")] == ["inner", file_name(key)]


@on_loop
async def test_files_are_for_their_owner_alone(tmp_path: Path, worker: Executor) -> None:
    before = os.umask(0)
    try:
        await on_disk(tmp_path, worker).put("a", b"secret")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / file_name("a")).st_mode) == 0o600


def damage_contents(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def use_another_name(file: Path) -> None:
    """As if a hash collided, or someone had copied it."""
    other = RecordFolder(file.parent, max_bytes=10 * PAGE, max_age=60.0, clock=lambda: 1000.0)
    other.put("other", b"not this one")
    (file.parent / file_name("other")).rename(file)


def link(file: Path) -> None:
    target = file.parent / "target"
    file.rename(target)
    file.symlink_to(target)


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize(
    "damage",
    [
        damage_contents,
        use_another_name,
        link,
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-2]),
        lambda file: file.write_bytes(b"x" * 500),
        lambda file: file.write_bytes(b"x" * 20 * PAGE),
    ],
)
def test_damaged_files_are_removed(damage, scanned: bool, tmp_path: Path, worker: Executor) -> None:
    async def read_again() -> bytes | None:
        records = on_disk(tmp_path, worker)
        await records.put("a", b"one")
        await records.put("b", b"two")
        damage(tmp_path / file_name("a"))
        records = on_disk(tmp_path, worker) if scanned else records
        assert await records.get("b") == b"two"
        return await records.get("a")

    assert asyncio.run(read_again()) is None
    assert not os.path.lexists(tmp_path / file_name("a"))
    assert (tmp_path / file_name("b")).exists()
    assert (damage is link) == (tmp_path / "target").exists(), "what a link points to is not ours"


@on_loop
async def test_partial_writes_are_removed_and_foreign_files_are_left(tmp_path: Path, worker: Executor) -> None:
    name = file_name("a")
    (tmp_path / f"{name}.0123456789abcdef.tmp").write_bytes(b"half")
    kept = ["notes.txt", f"{name}.tmp", f"x{name}"]
    for other in kept:
        (tmp_path / other).write_text("mine")
    (tmp_path / name).mkdir()  # not a file: it cannot be removed, and costs nothing but its record
    records = on_disk(tmp_path, worker)
    assert await records.get("a") is None
    await records.put("b", b"two")
    assert names(tmp_path) == sorted([*kept, name, file_name("b")])


@on_loop
async def test_what_a_full_disk_does_not_take_is_kept_in_memory(
    tmp_path: Path, worker: Executor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = on_disk(tmp_path, worker)
    await records.put("a", b"one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        await records.put("b", b"two")
        assert records.fails
    assert (await records.get("a"), await records.get("b")) == (b"one", b"two")
    assert names(tmp_path) == [file_name("a")]
    await records.put("b", b"three")
    assert not records.fails
    assert names(tmp_path) == sorted([file_name("a"), file_name("b")])
    assert await records.get("b") == b"three" == await on_disk(tmp_path, worker).get("b")
    assert (await records.delete("b"), await records.get("b")) == (True, None)
    assert [(log.levelno, log.message) for log in caplog.records] == [
        (logging.ERROR, "the store fails: [Errno 28] No space left on device")
    ]


@on_loop
async def test_servers_may_share_a_folder(tmp_path: Path, worker: Executor) -> None:
    one, two = on_disk(tmp_path, worker), on_disk(tmp_path, worker)
    await one.put("a", b"one")
    assert await two.get("a") == b"one"
    assert await two.delete("a")
    assert await one.get("a") is None


@on_loop
async def test_a_cancelled_caller_leaves_no_work_half_done(tmp_path: Path, worker: Executor) -> None:
    records = on_disk(tmp_path, worker)
    tasks = [asyncio.create_task(records.put(str(number), b"x" * 3000)) for number in range(8)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await records.put("last", b"x")
    assert await records.get("last") == b"x"
    assert await records.get("0") == b"x" * 3000, "it was handed over"
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]
