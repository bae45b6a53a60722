"""The budget for media: who waits, who goes first, who is refused, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from millstream.errors import EngineBusy, MediaRefused
from millstream.media.limits import MediaLimits
from millstream.media.port import Prepared
from millstream.service.media.files import MediaFiles
from millstream.service.media.memory import MediaMemory, Share
from millstream.types import Kind, MediaPart

LIMIT = 1000


def memory() -> MediaMemory:
    return MediaMemory(LIMIT, images=2, others=2)


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 30))


async def asked(budget: MediaMemory, size: int, stage: Any = None) -> asyncio.Task[Share]:
    task = asyncio.create_task(budget.share(stage or budget.images, size))
    await asyncio.sleep(0)
    return task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_first_come_first_served() -> None:
    async def main() -> None:
        budget = memory()
        first = await (await asked(budget, 600))
        large, small = await asked(budget, 700), await asked(budget, 100)
        await settle()
        assert not large.done() and not small.done(), "a small one has overtaken"
        first.drop()
        await settle()
        assert large.done() and small.done()
        for task in (large, small):
            (await task).drop()
        assert (budget.used, budget.waiting) == (0, 0)

    run(main)


def test_two_images_at_once_and_others_beside_them() -> None:
    async def main() -> None:
        budget = memory()
        images = [await asked(budget, 1) for _ in range(3)]
        other = await asked(budget, 1, budget.others)
        await settle()
        assert [task.done() for task in (*images, other)] == [True, True, False, True]
        (await images[0]).drop()
        await settle()
        assert images[2].done()

    run(main)


def test_one_decoder_may_always_run() -> None:
    """Files and what is kept have taken all: still the next one is decoded, alone, or nothing would ever end."""

    async def main() -> None:
        budget = memory()
        file = await (await asked(budget, 500, budget.files))
        budget.keep(500, 0)
        first, second = await asked(budget, 900), await asked(budget, 900)
        await settle()
        assert first.done() and not second.done()
        (await first).drop()
        (await second).drop()
        file.drop()
        budget.forget(500)
        assert (budget.used, budget.kept) == (0, 0)

    run(main)


def test_files_wait_for_decoders_and_never_the_other_way_round() -> None:
    async def main() -> None:
        budget = memory()
        held = await (await asked(budget, 900, budget.files))
        later = await asked(budget, 900, budget.files)
        decoder = await asked(budget, 900)
        await settle()
        assert decoder.done() and not later.done()
        (await decoder).drop()
        held.drop()
        (await later).drop()
        assert budget.used == 0

    run(main)


def test_what_can_never_be_is_refused() -> None:
    async def main() -> None:
        budget = memory()
        with pytest.raises(MediaRefused, match="--media-memory"):
            await budget.share(budget.images, LIMIT + 1)
        with pytest.raises(MediaRefused, match="fewer or smaller"):
            budget.keep(400, 700)
        budget.keep(700, 0)
        with pytest.raises(EngineBusy) as refused:
            budget.keep(400, 0)
        assert refused.value.retry_after > 0
        budget.check()
        budget.keep(300, 700)
        with pytest.raises(EngineBusy):
            budget.check()

    run(main)


@pytest.mark.parametrize("granted", [False, True])
def test_who_is_cancelled_while_waiting_leaves_nothing(granted: bool) -> None:
    async def main() -> None:
        budget = memory()
        first = await (await asked(budget, 1000))
        waits, behind = await asked(budget, 800), await asked(budget, 100)
        if granted:  # in the same turn of the loop: it has its share and does not know it yet
            first.drop()
        waits.cancel()
        await settle()
        assert waits.cancelled()
        if not granted:
            assert budget.waiting == 1
            first.drop()
        (await behind).drop()
        assert (budget.used, budget.waiting, budget.images.running) == (0, 0, 0)

    run(main)


class Reader:
    """Takes 300 bytes to decode a file, until `go`, and makes 100 of it."""

    def __init__(self) -> None:
        self.marks: dict[Kind, Any] = {}
        self.entered = threading.Semaphore(0)
        self.go = threading.Event()
        self.most = self.now = 0
        self._lock = threading.Lock()

    def decoding_bytes(self, kind: Kind, data: bytes) -> int:
        return 300

    def read(self, kind: Kind, data: bytes) -> Prepared:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.entered.release()
        assert self.go.wait(30)
        with self._lock:
            self.now -= 1
        if data == b"bad":
            raise MediaRefused("bad")
        return Prepared(kind, {"x": np.zeros(100, np.uint8)}, "", 1)


def parts(*data: str) -> list[MediaPart]:
    return [MediaPart("image", f"data:,{each}", f"messages[{place}]") for place, each in enumerate(data)]


def files_of(budget: MediaMemory, pool: ThreadPoolExecutor) -> MediaFiles:
    return MediaFiles(MediaLimits(size=50), budget, pool, pool, lambda *_: [])


def test_a_request_holds_what_its_engine_is_given_until_it_ends() -> None:
    async def main() -> None:
        with ThreadPoolExecutor(4) as pool:
            budget, reader = memory(), Reader()
            reader.go.set()
            media = files_of(budget, pool).of_request(2)
            assert len(await media.prepare(parts("a", "b", "c"), {"image"}, reader)) == 3
            await asyncio.sleep(0)
            assert (budget.used, budget.kept) == (600, 600)
            assert reader.most <= 2
            other = files_of(budget, pool).of_request(1)
            with pytest.raises(EngineBusy):
                await other.prepare(parts(*"abcde"), {"image"}, reader)
            other.release()
            media.release()
            media.release()
            await until(lambda: (budget.used, budget.kept) == (0, 0))

    run(main)


async def until(condition: Callable[[], bool]) -> None:
    """Threads give back on their own time."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_a_request_that_leaves_gives_back_when_its_threads_have_ended() -> None:
    async def main() -> None:
        with ThreadPoolExecutor(4) as pool:
            budget, reader = memory(), Reader()
            media = files_of(budget, pool).of_request(1)
            task = asyncio.create_task(media.prepare(parts(*"abcdef"), {"image"}, reader))
            await until(lambda: reader.now == 2 and budget.waiting == 4)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            media.release()
            await settle()
            assert (budget.waiting, budget.images.running) == (0, 2), "threads still decode: their memory is not free"
            assert budget.used >= 600
            reader.go.set()
            await until(lambda: (budget.used, budget.kept, budget.images.running, budget.files.running) == (0, 0, 0, 0))
            assert reader.most == 2, "a file was decoded that nobody wanted any more"

    run(main)


def test_one_bad_file_gives_back_all() -> None:
    async def main() -> None:
        with ThreadPoolExecutor(4) as pool:
            budget, reader = memory(), Reader()
            reader.go.set()
            media = files_of(budget, pool).of_request(1)
            with pytest.raises(MediaRefused, match="messages"):
                await media.prepare(parts("a", "bad", "c", "d"), {"image"}, reader)
            media.release()
            await until(lambda: (budget.used, budget.kept, budget.images.running, budget.files.running) == (0, 0, 0, 0))

    run(main)
