"""Owner threads that are used again, and those that must not be."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from millstream.engine.generation.messages import Generate
from millstream.engine.link import ThreadLink
from millstream.engine.owner_threads import OwnerThreads
from millstream.engine.protocols import BackendFactory
from millstream.loading.backends import generation_backend
from millstream.loading.settings import EngineSettings
from millstream.models.source import ModelSource
from support.engines import Driver, scheduler
from support.fake import FakeBackend, Gate


def link(make: BackendFactory, threads: OwnerThreads) -> Driver:
    return Driver(ThreadLink("test", make, functools.partial(scheduler, 7), threads))


def life(make: BackendFactory, threads: OwnerThreads) -> tuple[int | None, list[list[int]]]:
    """The thread's number and the answers of an engine that was started and stopped."""
    driver = link(make, threads)
    driver.start()
    answers = driver.run(Generate(1, (1, 2, 3), 5), Generate(2, (4, 5), 5))
    _, thread = driver.link.where()
    driver.stop()
    assert driver.link.where()[1] is None
    return thread, answers


@pytest.fixture(params=["fake", "mlx"])
def make(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> BackendFactory:
    if request.param == "fake":
        return functools.partial(FakeBackend, max_rows=4)
    return functools.partial(
        generation_backend, ModelSource("tiny", "folder", tiny_model("llama")), EngineSettings(max_batch=4)
    )


def test_engines_one_after_the_other_share_a_thread_and_answer_alike(make: BackendFactory) -> None:
    threads, own = OwnerThreads(), psutil.Process()
    before = threading.active_count()
    numbers, answers = zip(*(life(make, threads) for _ in range(3)), strict=True)
    marks = [own.num_threads()]
    for _ in range(20):
        number, answer = life(make, threads)
        assert (number, answer) == (numbers[0], answers[0])
    marks.append(own.num_threads())
    assert len(set(numbers)) == 1
    assert answers[0] == answers[1] == answers[2]
    # One a life would be 20; MLX and others may begin a thread of their own now and then.
    assert marks[1] - marks[0] < 4
    threads.close()
    assert threading.active_count() == before


def test_engines_side_by_side_have_threads_of_their_own(make: BackendFactory) -> None:
    threads = OwnerThreads()
    drivers = [link(make, threads) for _ in range(2)]
    for driver in drivers:
        driver.start()
    assert len({driver.link.where()[1] for driver in drivers}) == 2
    for driver in drivers:
        driver.stop()
    threads.close()


def test_a_thread_whose_load_failed_is_used_again() -> None:
    def broken() -> FakeBackend:
        raise OSError("no such file")

    threads = OwnerThreads()
    first, _ = life(FakeBackend, threads)
    driver = link(broken, threads)
    driver.link.start_soon(driver.batches.put)
    driver.wait(lambda: driver.stopped)
    assert driver.load_error == "OSError: no such file"
    assert driver.link.join(10)
    assert life(FakeBackend, threads)[0] == first
    threads.close()


def test_a_disowned_thread_is_not_used_again() -> None:
    threads, gate, before = OwnerThreads(), Gate(), threading.active_count()
    hung = link(lambda: FakeBackend(gate=gate), threads)
    hung.start()
    hung.post(Generate(1, (1, 2), 5))
    gate.wait_entered()
    _, thread = hung.link.where()
    hung.link.disown("it hangs")
    assert not hung.link.join(0.01)
    assert life(FakeBackend, threads)[0] != thread
    gate.open()
    hung.wait(lambda: hung.stopped)
    assert hung.link.join(10)
    assert life(FakeBackend, threads)[0] != thread
    threads.close()
    assert threading.active_count() == before


def test_a_thread_whose_model_could_not_be_freed_is_not_used_again() -> None:
    class Unfree(FakeBackend):
        def close(self) -> None:
            raise RuntimeError("the stream is broken")

    threads, before = OwnerThreads(), threading.active_count()
    life(Unfree, threads)
    assert threading.active_count() == before
    assert life(FakeBackend, threads)[0] is not None
    threads.close()


def test_nothing_of_an_engine_stays_with_a_parked_thread() -> None:
    import gc
    import weakref

    threads = OwnerThreads()
    made: list[weakref.ref[FakeBackend]] = []

    def make() -> FakeBackend:
        backend = FakeBackend()
        made.append(weakref.ref(backend))
        return backend

    life(make, threads)
    gc.collect()
    assert made[0]() is None
    threads.close()
