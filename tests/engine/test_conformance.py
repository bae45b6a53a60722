"""What every kind of engine guarantees, over both links, thread and process.

One suite runs on generation, with the fake backend and with MLX, on encoders, on transcription, on speech, and on a
kind without tokens. So the fake stays close to the real backend, and the owner loop, links and mailbox stay independent
of the kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from millstream.engine.link import ThreadLink
from millstream.engine.messages import Cancel, Failed, Finished, Shutdown
from millstream.engine.process_link import ProcessLink
from millstream.errors import EngineGone
from support.digest_kind import CAPACITY, REFUSED, Digest, DigestBackend, DigestScheduler, SetSalt, expected
from support.engines import Driver, engine
from support.fake import panic
from support.fifo_gate import FifoGate
from support.kinds import LINKS, ForeignCommand, ForeignWork, Kind, kind_of
from support.processes import children_find_us
from support.tiers import some
from support.wrapped import gated


@pytest.fixture(scope="module", params=["fake", "mlx", "encoder", "transcription", "speech", "digest"])
def kind(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Kind:
    return kind_of(request.param, tiny_model)


class Held:
    """An engine that is held in every step until the gate opens."""

    def __init__(self, kind: Kind, link: Any, folder: Path) -> None:
        self.gate = FifoGate(folder)
        self.kind = kind
        self.link = link

    def start(self) -> AbstractContextManager[Driver]:
        backend = functools.partial(gated, self.kind.backend, self.gate.remote)
        return engine(backend, kind=self.link, make_scheduler=self.kind.scheduler)


@pytest.fixture
def held(kind: Kind, link: Any, tmp_path: Path) -> Iterator[Held]:
    held = Held(kind, link, tmp_path / "gate")
    yield held
    held.gate.close()


held_in = pytest.mark.parametrize(
    ("kind", "link"),
    some(
        [(kind, link) for kind in ("fake", "mlx", "encoder", "transcription", "speech", "digest") for link in LINKS],
        [
            ("fake", "thread"),
            ("fake", "process"),
            ("mlx", "thread"),
            ("encoder", "thread"),
            ("transcription", "thread"),
            ("speech", "thread"),
            ("digest", "thread"),
            ("digest", "process"),
        ],
    ),
    indirect=True,
)
"""Each of these tests starts an engine of its own, and a child with MLX takes seconds to start."""


def test_the_model_says_what_it_can_do(driver: Driver) -> None:
    facts = driver.facts
    assert facts is not None
    assert facts.capacity == CAPACITY
    assert facts.device.startswith("cpu") and facts.summary
    assert driver.measured.memory_bytes > 0


def test_equal_requests_have_equal_results(driver: Driver, kind: Kind) -> None:
    driver.complete(kind.work(1, seed=5), kind.work(2, seed=6))
    driver.complete(kind.work(3, seed=5))
    first, other, again = (kind.result(driver, number) for number in (1, 2, 3))
    assert len(first) == 5
    assert first == again != other
    assert all(isinstance(ends[0], Finished) for ends in driver.ends.values())


def test_more_requests_than_capacity_are_all_served(driver: Driver, kind: Kind) -> None:
    for number in range(3 * CAPACITY):
        driver.complete(kind.work(100 + number, seed=number))
    driver.complete(*(kind.work(number, seed=number) for number in range(3 * CAPACITY)))
    for number in range(3 * CAPACITY):
        assert kind.result(driver, number) == kind.result(driver, 100 + number)


@held_in
def test_a_cancel_ends_the_request_before_the_next_step(held: Held) -> None:
    with held.start() as driver:
        driver.post(held.kind.work(1, steps=400))
        driver.post(held.kind.work(2, steps=5))
        held.gate.wait_entered()
        driver.post(Cancel(1))
        # A thread has the cancel already; for a process it may take a few steps to arrive.
        driver.wait(lambda: 1 in driver.ends, nudge=held.gate.let_one)
        assert isinstance(driver.ends[1][0], Finished)
        assert len(held.kind.result(driver, 1)) <= (1 if held.link is ThreadLink else 20)
        held.gate.open()
        driver.wait_ended(2)
        assert len(held.kind.result(driver, 2)) == 5


def test_cancelling_unknown_or_ended_requests_does_nothing(driver: Driver, kind: Kind) -> None:
    driver.complete(kind.work(1, steps=2))
    driver.post(Cancel(1))
    driver.post(Cancel(77))
    driver.complete(kind.work(2, steps=2))
    assert len(kind.result(driver, 2)) == 2


def test_commands_of_another_kind_are_refused_and_the_engine_serves_on(driver: Driver, kind: Kind) -> None:
    driver.post(kind.work(1, steps=40))
    driver.post(ForeignCommand())
    driver.complete(ForeignWork(2))
    refused = driver.ends[2][0]
    assert isinstance(refused, Failed) and not refused.gone
    assert refused.message == "this kind of engine does not know the command ForeignWork"
    driver.wait_ended(1)
    assert isinstance(driver.ends[1][0], Finished)


def test_a_failed_step_fails_its_requests_but_not_the_engine(held: Held) -> None:
    work, result = held.kind.work, held.kind.result
    with held.start() as driver:
        held.gate.open()
        driver.complete(work(1))
        held.gate.fail_next("the test made the step fail")
        driver.complete(work(2))
        failed = driver.ends[2][0]
        assert isinstance(failed, Failed)
        assert "the test made the step fail" in failed.message
        assert not failed.gone
        driver.complete(work(3))
        assert result(driver, 3) == result(driver, 1) != []


@held_in
def test_shutdown_fails_what_is_left_and_refuses_what_comes(held: Held) -> None:
    work = held.kind.work
    with held.start() as driver:
        for number in range(CAPACITY + 2):
            driver.post(work(number, steps=400))
        held.gate.wait_entered()
        driver.post(Shutdown("closing time"))
        driver.post(work(99))
        held.gate.open()
        driver.stop()
        ends = [driver.ends[number][0] for number in (*range(CAPACITY + 2), 99)]
        assert all(isinstance(end, Failed) and end.gone and end.message == "closing time" for end in ends)
        with pytest.raises(EngineGone, match="closing time"):
            driver.post(work(100))


@held_in
def test_an_idle_owner_beats_and_a_step_shows(held: Held) -> None:
    with held.start() as driver:
        first = driver.link.heartbeat()
        assert first.step == 0 < first.last
        driver.wait(lambda: driver.link.heartbeat().last > first.last, nudge=lambda: None)
        driver.post(held.kind.work(1, steps=3))
        held.gate.wait_entered()
        assert driver.link.heartbeat().step > first.last
        assert not driver.link.stopped()
        held.gate.open()
        driver.wait_ended(1)
        driver.wait(lambda: driver.link.heartbeat().step == 0, nudge=lambda: None)


def test_any_error_at_load_is_reported_and_the_owner_ends(kind: Kind, link: Any) -> None:
    driver = Driver(link("x", panic, kind.scheduler))
    driver.link.start_soon(driver.batches.put)
    driver.wait(lambda: driver.stopped)
    assert driver.load_error == "Panic: capacity overflow"
    assert driver.link.heartbeat() == (0, 0)
    assert driver.link.join(10)


@pytest.mark.parametrize("link_name", list(LINKS))
def test_a_kind_can_have_its_own_background_tasks_and_commands(link_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    children_find_us(monkeypatch)
    with engine(DigestBackend, kind=LINKS[link_name], make_scheduler=DigestScheduler) as driver:
        large = b"x" * 1000
        driver.complete(Digest(1, large), Digest(2, REFUSED))
        refused = driver.ends[2][0]
        assert isinstance(refused, Failed) and refused.refused and "not hashed here" in refused.message
        driver.post(SetSalt(b"salt"))
        driver.complete(Digest(3, large, rounds=2))
        digests = [driver.ends[number][0].digest for number in (1, 3)]  # type: ignore[union-attr]
        assert digests == [expected(large), expected(b"salt" + large, 2)]


def test_a_process_that_dies_fails_its_requests(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children_find_us(monkeypatch)
    held = Held(kind, ProcessLink, tmp_path / "gate")
    with held.start() as driver:
        driver.post(held.kind.work(1, steps=400))
        held.gate.wait_entered()
        driver.link.kill("killed by the test")
        driver.wait(lambda: driver.stopped)
        end = driver.ends[1][0]
        assert isinstance(end, Failed) and end.gone and end.message == "killed by the test"
    held.gate.close()
