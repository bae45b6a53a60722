"""The memory budget for media: waiting order, refusals, and complete release."""

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
from millstream.media.port import PreparedMedia
from millstream.service.media.files import MediaFiles
from millstream.service.media.memory import MediaMemory, Reservation, WorkLimit
from millstream.types import Kind, MediaPart

LIMIT = 1000


def memory() -> MediaMemory:
    return MediaMemory(LIMIT, image_decodes=2, av_decodes=2)


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 30))


async def reserving(budget: MediaMemory, size: int, work: WorkLimit | None = None) -> asyncio.Task[Reservation]:
    task = asyncio.create_task(budget.reserve(work or budget.image_decodes, size))
    await asyncio.sleep(0)
    return task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_first_come_first_served() -> None:
    async def main() -> None:
        budget = memory()
        first = await (await reserving(budget, 600))
        large, small = await reserving(budget, 700), await reserving(budget, 100)
        await settle()
        assert not large.done() and not small.done(), "a small reservation overtook a large one"
        first.drop()
        await settle()
        assert large.done() and small.done()
        for task in (large, small):
            (await task).drop()
        assert (budget.used, budget.waiting) == (0, 0)

    run(main)


def test_two_image_decodes_at_once_and_videos_in_addition() -> None:
    async def main() -> None:
        budget = memory()
        images = [await reserving(budget, 1) for _ in range(3)]
        other = await reserving(budget, 1, budget.av_decodes)
        await settle()
        assert [task.done() for task in (*images, other)] == [True, True, False, True]
        (await images[0]).drop()
        await settle()
        assert images[2].done()

    run(main)


def test_one_decode_may_always_run() -> None:
    """Files and prepared tensors take the whole budget: the next file is decoded anyway, alone, to avoid a deadlock."""

    async def main() -> None:
        budget = memory()
        file = await (await reserving(budget, 500, budget.fetches))
        budget.add_prepared(500, 0)
        first, second = await reserving(budget, 900), await reserving(budget, 900)
        await settle()
        assert first.done() and not second.done()
        (await first).drop()
        (await second).drop()
        file.drop()
        budget.remove_prepared(500)
        assert (budget.used, budget.prepared) == (0, 0)

    run(main)


def test_fetches_wait_for_decodes_but_decodes_never_for_fetches() -> None:
    async def main() -> None:
        budget = memory()
        held = await (await reserving(budget, 900, budget.fetches))
        later = await reserving(budget, 900, budget.fetches)
        decoder = await reserving(budget, 900)
        await settle()
        assert decoder.done() and not later.done()
        (await decoder).drop()
        held.drop()
        (await later).drop()
        assert budget.used == 0

    run(main)


def test_sizes_over_the_total_budget_are_refused() -> None:
    async def main() -> None:
        budget = memory()
        with pytest.raises(MediaRefused, match="--media-memory"):
            await budget.reserve(budget.image_decodes, LIMIT + 1)
        with pytest.raises(MediaRefused, match="fewer or smaller"):
            budget.add_prepared(400, 700)
        budget.add_prepared(700, 0)
        with pytest.raises(EngineBusy) as refused:
            budget.add_prepared(400, 0)
        assert refused.value.retry_after > 0
        budget.check()
        budget.add_prepared(300, 700)
        with pytest.raises(EngineBusy):
            budget.check()

    run(main)


@pytest.mark.parametrize("freed", ["before", "at once", "later"])
def test_a_cancelled_waiter_leaves_nothing_behind(freed: str) -> None:
    """Memory is freed before the waiter is cancelled, or after it in the same iteration of the loop, or later."""

    async def main() -> None:
        budget = memory()
        first = await (await reserving(budget, 1000))
        waits, behind = await reserving(budget, 800), await reserving(budget, 100)
        if freed == "before":  # it has its reservation but has not resumed
            first.drop()
        waits.cancel()
        if freed == "at once":  # it is in the queue still, but can be granted nothing
            first.drop()
        await settle()
        assert waits.cancelled()
        if freed == "later":
            assert budget.waiting == 1
            first.drop()
        (await behind).drop()
        assert (budget.used, budget.waiting, budget.image_decodes.running) == (0, 0, 0)

    run(main)


class FakePreprocessor:
    """Decoding takes 300 bytes, blocks until `go` is set, and returns tensors of 100 bytes."""

    def __init__(self) -> None:
        self.placeholders: dict[Kind, Any] = {}
        self.entered = threading.Semaphore(0)
        self.go = threading.Event()
        self.max_running = self.running = 0
        self._lock = threading.Lock()

    def decoding_bytes(self, kind: Kind, data: bytes) -> int:
        return 300

    def preprocess(self, kind: Kind, data: bytes) -> PreparedMedia:
        with self._lock:
            self.running += 1
            self.max_running = max(self.max_running, self.running)
        self.entered.release()
        assert self.go.wait(30)
        with self._lock:
            self.running -= 1
        if data == b"bad":
            raise MediaRefused("bad")
        return PreparedMedia(kind, {"x": np.zeros(100, np.uint8)}, "", 1)


def parts(*data: str) -> list[MediaPart]:
    return [MediaPart("image", f"data:,{each}", f"messages[{index}]") for index, each in enumerate(data)]


def files_of(budget: MediaMemory, pool: ThreadPoolExecutor) -> MediaFiles:
    return MediaFiles(MediaLimits(file_bytes=50), budget, pool, pool, lambda *_: [])


def test_a_request_holds_its_prepared_tensors_until_it_ends() -> None:
    async def main() -> None:
        with ThreadPoolExecutor(4) as pool:
            budget, preprocessor = memory(), FakePreprocessor()
            preprocessor.go.set()
            media = files_of(budget, pool).for_request(2)
            assert len(await media.prepare(parts("a", "b", "c"), {"image"}, preprocessor)) == 3
            await asyncio.sleep(0)
            assert (budget.used, budget.prepared) == (600, 600)
            assert preprocessor.max_running <= 2
            other = files_of(budget, pool).for_request(1)
            with pytest.raises(EngineBusy):
                await other.prepare(parts(*"abcde"), {"image"}, preprocessor)
            other.release()
            media.release()
            media.release()
            await until(lambda: (budget.used, budget.prepared) == (0, 0))

    run(main)


async def until(condition: Callable[[], bool]) -> None:
    """Polls, because threads release their memory asynchronously."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_a_cancelled_request_frees_memory_when_its_threads_have_ended() -> None:
    async def main() -> None:
        with ThreadPoolExecutor(4) as pool:
            budget, preprocessor = memory(), FakePreprocessor()
            media = files_of(budget, pool).for_request(1)
            task = asyncio.create_task(media.prepare(parts(*"abcdef"), {"image"}, preprocessor))
            await until(lambda: preprocessor.running == 2 and budget.waiting == 4)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            media.release()
            await settle()
            assert (budget.waiting, budget.image_decodes.running) == (0, 2), (
                "threads still decode: their memory is in use"
            )
            assert budget.used >= 600
            preprocessor.go.set()
            await until(
                lambda: (
                    (budget.used, budget.prepared, budget.image_decodes.running, budget.fetches.running) == (0, 0, 0, 0)
                )
            )
            assert preprocessor.max_running == 2, "a file of the cancelled request was decoded"

    run(main)


def test_one_bad_file_frees_everything() -> None:
    async def main() -> None:
        with ThreadPoolExecutor(4) as pool:
            budget, preprocessor = memory(), FakePreprocessor()
            preprocessor.go.set()
            media = files_of(budget, pool).for_request(1)
            with pytest.raises(MediaRefused, match="messages"):
                await media.prepare(parts("a", "bad", "c", "d"), {"image"}, preprocessor)
            media.release()
            await until(
                lambda: (
                    (budget.used, budget.prepared, budget.image_decodes.running, budget.fetches.running) == (0, 0, 0, 0)
                )
            )

    run(main)
