"""Errands: in fair order, none for requests that have left, and everyone is told how theirs went."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from millstream.engine import background as module
from millstream.engine.background import BackgroundTask, BackgroundThread, Done
from millstream.errors import BadRequest, ModelError

WAIT = 10


class Busy:
    """Errands whose thread is held up by the first one."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self._told = threading.Semaphore(0)
        self.background = BackgroundThread(self._told.release)
        self.background.run_soon(0, BackgroundTask(self._hold))
        assert self.begun.wait(WAIT)

    def add(self, number: int, size: int = 0) -> None:
        self.background.run_soon(number, BackgroundTask(lambda: self.order.append(number), size))

    def finish(self, count: int) -> list[Done]:
        self.go.set()
        for _ in range(count + 1):
            assert self._told.acquire(timeout=WAIT)
        return list(self.background.done())

    def _hold(self) -> None:
        self.begun.set()
        assert self.go.wait(WAIT)


@pytest.fixture
def busy() -> Iterator[Busy]:
    made = Busy()
    yield made
    made.go.set()
    made.background.close()


def test_small_ones_overtake_large_ones(busy: Busy) -> None:
    busy.add(1, 200_000)
    busy.add(2, 100_000)
    busy.add(3, 10)
    busy.add(4)
    busy.finish(4)
    assert busy.order == [4, 3, 2, 1]


def test_a_large_one_is_not_overtaken_for_ever(busy: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    busy.add(1, 50_000)
    now += 0.5
    busy.add(2, 10)
    now += 1.0
    busy.add(3, 10)
    busy.finish(3)
    assert busy.order == [2, 1, 3]


def test_a_task_for_a_request_that_has_left_is_not_begun(busy: Busy) -> None:
    for number in (1, 2, 3):
        busy.add(number)
    busy.background.cancel(2)
    busy.background.cancel(9)
    assert [done.request_id for done in busy.finish(2)] == [0, 1, 3]
    assert busy.order == [1, 3]


def test_whose_fault_it_was(busy: Busy) -> None:
    def fail(error: BaseException) -> None:
        raise error

    for number, error in enumerate([BadRequest("unfit"), ModelError("no vocabulary"), SystemExit("gone")], 1):
        busy.background.run_soon(number, BackgroundTask(lambda error=error: fail(error), number))  # type: ignore[misc]
    assert busy.finish(3) == [
        Done(0),
        Done(1, "unfit", refused=True),
        Done(2, "no vocabulary"),
        Done(3, "SystemExit: gone"),
    ]


def test_nothing_is_begun_after_close(busy: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.01)
    busy.add(1)
    busy.background.close()
    assert [done.request_id for done in busy.finish(0)] == [0]
    monkeypatch.undo()
    busy.background.close()
    assert busy.order == []
