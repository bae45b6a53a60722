"""Background tasks: their order, cancellation, and that every request gets its outcome."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from millstream.engine import background as module
from millstream.engine.background import BackgroundTask, BackgroundThread, Done
from millstream.errors import BadRequest, ModelError

TIMEOUT = 60


class Busy:
    """A background thread that is held by its first task."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.started, self.go = threading.Event(), threading.Event()
        self._woken = threading.Semaphore(0)
        self.background = BackgroundThread(self._woken.release)
        self.background.run_soon(0, BackgroundTask(self._hold))
        assert self.started.wait(TIMEOUT)

    def add(self, number: int, size: int = 0) -> None:
        self.background.run_soon(number, BackgroundTask(lambda: self.order.append(number), size))

    def finish(self, count: int) -> list[Done]:
        self.go.set()
        for _ in range(count + 1):
            assert self._woken.acquire(timeout=TIMEOUT)
        return list(self.background.done())

    def _hold(self) -> None:
        self.started.set()
        assert self.go.wait(TIMEOUT)


@pytest.fixture
def busy() -> Iterator[Busy]:
    made = Busy()
    yield made
    made.go.set()
    made.background.close()


def test_small_tasks_overtake_large_ones(busy: Busy) -> None:
    busy.add(1, 200_000)
    busy.add(2, 100_000)
    busy.add(3, 10)
    busy.add(4)
    busy.finish(4)
    assert busy.order == [4, 3, 2, 1]


def test_a_large_task_does_not_starve(busy: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    busy.add(1, 50_000)
    now += 0.5
    busy.add(2, 10)
    now += 1.0
    busy.add(3, 10)
    busy.finish(3)
    assert busy.order == [2, 1, 3]


def test_a_cancelled_task_is_not_started(busy: Busy) -> None:
    for number in (1, 2, 3):
        busy.add(number)
    busy.background.cancel(2)
    busy.background.cancel(9)
    assert [done.request_id for done in busy.finish(2)] == [0, 1, 3]
    assert busy.order == [1, 3]


def test_outcomes_say_whether_the_input_was_at_fault(busy: Busy) -> None:
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


def test_no_task_is_started_after_close(busy: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.01)
    busy.add(1)
    busy.background.close()
    assert [done.request_id for done in busy.finish(0)] == [0]
    monkeypatch.undo()
    busy.background.close()
    assert busy.order == []
