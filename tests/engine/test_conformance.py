"""One suite over both links, thread and process, and over the fake backend and MLX on the CPU, so that the fake cannot
drift from the real thing."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.compose import text_backend
from millstream.config import Settings
from millstream.engine.generation.backend import BackendFactory
from millstream.engine.generation.scheduler import Scheduler
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Cancel, Failed, Finished, Shutdown, Submit
from millstream.engine.process_link import ProcessLink
from millstream.errors import EngineGone
from millstream.models.source import ModelSource
from millstream.types import FinishReason, TokenLogprob
from support.engines import Driver, engine, scheduler
from support.fake import FakeBackend, panic
from support.fifo_gate import FifoGate
from support.guided import children_find_us
from support.tiers import some
from support.wrapped import gated

ROWS = 4
LINKS = {"thread": ThreadLink, "process": ProcessLink}


@pytest.fixture(scope="module", params=["fake", "mlx"])
def make(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> BackendFactory:
    if request.param == "fake":
        return functools.partial(FakeBackend, max_rows=ROWS)
    return functools.partial(text_backend, ModelSource("tiny", "folder", tiny_model("llama")), Settings(max_batch=ROWS))


@pytest.fixture(scope="module", params=list(LINKS))
def kind(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The child has to find the fake backend, too."""
    with pytest.MonkeyPatch.context() as patch:
        children_find_us(patch)
        yield LINKS[request.param]


@pytest.fixture(scope="module")
def shared(make: BackendFactory, kind: Any) -> Iterator[Driver]:
    with engine(make, kind=kind) as running:
        yield running


@pytest.fixture
def driver(shared: Driver) -> Driver:
    shared.forget()
    return shared


class Held:
    """An engine that stands still in every step until the gate opens."""

    def __init__(self, make: BackendFactory, kind: Any, folder: Path) -> None:
        self.gate = FifoGate(folder)
        self._make = make
        self.kind = kind

    def start(self) -> AbstractContextManager[Driver]:
        return engine(functools.partial(gated, self._make, self.gate.far), kind=self.kind)


@pytest.fixture
def held(make: BackendFactory, kind: Any, tmp_path: Path) -> Iterator[Held]:
    held = Held(make, kind, tmp_path / "gate")
    yield held
    held.gate.close()


held_in = pytest.mark.parametrize(
    ("make", "kind"),
    some(
        [(make, kind) for make in ("fake", "mlx") for kind in LINKS],
        [("fake", "thread"), ("fake", "process"), ("mlx", "thread")],
    ),
    indirect=True,
)
"""An engine for each test: children with MLX take seconds to start."""


def finish_reason(driver: Driver, request_id: int) -> FinishReason:
    end = driver.ends[request_id][0]
    assert isinstance(end, Finished)
    return end.reason


def test_tokens_come_up_to_the_limit(driver: Driver) -> None:
    [tokens] = driver.run(Submit(1, (1, 2, 3), 10))
    assert len(tokens) == 10
    end = driver.ends[1][0]
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.prompt_tokens, end.usage.completion_tokens) == (FinishReason.LENGTH, 3, 10)


def test_the_same_prompt_twice_gives_the_same_tokens(driver: Driver) -> None:
    first = driver.run(Submit(1, (5, 6, 7), 8))
    assert driver.run(Submit(2, (5, 6, 7), 8)) == first
    assert driver.run(Submit(3, (5, 6, 7), 8), Submit(4, (5, 6, 7), 8)) == first * 2


def test_a_prompt_that_continues_an_earlier_one(driver: Driver) -> None:
    """What was said before is not remembered in any way that changes the answer."""
    [fresh] = driver.run(Submit(1, (5, 6, 7, 8, 9), 6))
    driver.run(Submit(2, (5, 6, 7), 6))
    assert driver.run(Submit(3, (5, 6, 7, 8, 9), 6)) == [fresh]


def test_a_one_token_prompt_and_a_one_token_answer(driver: Driver) -> None:
    [long] = driver.run(Submit(1, (42,), 5))
    [short] = driver.run(Submit(2, (42,), 1))
    assert len(long) == 5
    assert short == long[:1]
    assert finish_reason(driver, 2) is FinishReason.LENGTH


def test_a_stop_token_ends_the_answer_before_it(driver: Driver) -> None:
    [tokens] = driver.run(Submit(1, (3, 1, 4), 20))
    stop = tokens[4]
    first = tokens.index(stop)
    assert driver.run(Submit(2, (3, 1, 4), 20, stop_tokens=frozenset({stop}))) == [tokens[:first]]
    assert finish_reason(driver, 2) is FinishReason.STOP


def test_more_requests_than_rows_are_all_served(driver: Driver) -> None:
    alone = [driver.run(Submit(100 + number, (number, 1, 2), 6))[0] for number in range(12)]
    together = driver.run(*(Submit(number, (number, 1, 2), 6) for number in range(12)))
    assert together == alone


def test_logprobs_come_for_the_rows_that_ask_and_no_others(driver: Driver) -> None:
    driver.run(Submit(1, (1, 2), 4, logprobs=2), Submit(2, (1, 2), 4), Submit(3, (9, 9), 4, logprobs=0))
    assert driver.logprobs[2] == []
    for request_id, top in ((1, 2), (3, 0)):
        entries = driver.logprobs[request_id]
        assert [entry.token for entry in entries if isinstance(entry, TokenLogprob)] == driver.tokens[request_id]
        assert all(len(entry.top) == top and entry.logprob <= 0 for entry in entries if isinstance(entry, TokenLogprob))


@held_in
def test_a_cancel_ends_the_row_before_the_next_step(held: Held) -> None:
    with held.start() as driver:
        driver.post(Submit(1, (1, 2), 400))
        driver.post(Submit(2, (3, 4), 5))
        held.gate.wait_entered()
        driver.post(Cancel(1))
        # A thread has the cancel already; to a process it is on its way, and a few steps may go by.
        driver.wait(lambda: 1 in driver.ends, nudge=held.gate.let_one)
        assert finish_reason(driver, 1) is FinishReason.CANCELLED
        assert len(driver.tokens.get(1, [])) <= (0 if held.kind is ThreadLink else 20)
        held.gate.open()
        driver.wait_ended(2)
        assert len(driver.tokens[2]) == 5


def test_cancelling_what_is_unknown_or_over_does_nothing(driver: Driver) -> None:
    driver.run(Submit(1, (1, 2), 2))
    driver.post(Cancel(1))
    driver.post(Cancel(77))
    assert len(driver.run(Submit(2, (1, 2), 2))[0]) == 2


def test_a_failed_step_fails_its_requests_and_the_engine_serves_on(held: Held) -> None:
    with held.start() as driver:
        held.gate.open()
        [expected] = driver.run(Submit(1, (1, 2, 3), 5))
        held.gate.fail_next("the step was told to fail")
        driver.run(Submit(2, (1, 2, 3), 5))
        failed = driver.ends[2][0]
        assert isinstance(failed, Failed)
        assert "the step was told to fail" in failed.message
        assert not failed.gone
        assert driver.run(Submit(3, (1, 2, 3), 5)) == [expected]


@held_in
def test_shutdown_fails_what_is_left_and_refuses_what_comes(held: Held) -> None:
    with held.start() as driver:
        for number in range(ROWS + 2):
            driver.post(Submit(number, (1, 2), 400))
        held.gate.wait_entered()
        driver.post(Shutdown("closing time"))
        driver.post(Submit(99, (1, 2), 5))
        held.gate.open()
        driver.stop()
        ends = [driver.ends[number][0] for number in (*range(ROWS + 2), 99)]
        assert all(isinstance(end, Failed) and end.gone and end.message == "closing time" for end in ends)
        with pytest.raises(EngineGone, match="closing time"):
            driver.post(Submit(100, (1,), 1))


@held_in
def test_an_idle_owner_beats_and_a_step_shows(held: Held) -> None:
    with held.start() as driver:
        first = driver.link.heartbeat()
        assert first.step == 0 < first.last
        driver.wait(lambda: driver.link.heartbeat().last > first.last, nudge=lambda: None)
        driver.post(Submit(1, (1, 2), 3))
        held.gate.wait_entered()
        assert driver.link.heartbeat().step > first.last
        assert not driver.link.stopped()
        held.gate.open()
        driver.wait_ended(1)
        driver.wait(lambda: driver.link.heartbeat().step == 0, nudge=lambda: None)


def test_what_a_library_raises_at_load_is_told_and_the_owner_ends(kind: Any) -> None:
    driver = Driver(kind("x", panic, functools.partial(scheduler, 7)))
    driver.link.start_soon(driver.batches.put)
    driver.wait(lambda: driver.stopped)
    assert driver.load_error == "Panic: capacity overflow"
    assert driver.link.heartbeat() == (0, 0)
    assert driver.link.join(10)


def test_a_model_that_cannot_be_loaded_is_reported_and_the_thread_ends(tmp_path: Path) -> None:
    def factory() -> MlxGenerationBackend:
        return MlxGenerationBackend(GenerationSettings("folder", tmp_path / "nothing", max_rows=1))

    before = threading.active_count()
    driver = Driver(ThreadLink("x", factory, lambda _: Scheduler(max_rows=1, prefill_tokens=1)))
    driver.post(Submit(1, (1,), 1))
    driver.link.start_soon(driver.batches.put)
    driver.wait(lambda: driver.stopped)
    assert driver.load_error is not None
    assert "nothing" in driver.load_error
    assert isinstance(driver.ends[1][0], Failed)
    assert driver.link.join(10)
    assert threading.active_count() == before
