"""The process link: the same messages and guarantees as the thread link, and a crash that affects only its engine."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream.engine.generation.messages import Generate, Generated, Tokens
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.messages import Cancel, Failed, Finished, LoadFailed, Stopped
from millstream.engine.process_link import ProcessLink
from millstream.engine.protocols import BackendFactory
from millstream.errors import EngineGone
from millstream.loading.backends import generation_backend
from millstream.loading.settings import EngineSettings
from millstream.model_facts import GenerationFacts
from millstream.models.source import ModelSource
from millstream.types import FinishReason, TokenLogprob, Usage
from support.digest_kind import DigestBackend, DigestScheduler
from support.engines import Driver, engine
from support.fake import FakeBackend, exit_at_once
from support.processes import children_find_us
from support.tiers import some


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes must be able to import the fake backend."""
    children_find_us(monkeypatch)


def pid_of(link: ProcessLink) -> int:
    pid, _ = link.where()
    assert pid is not None
    return pid


def start(backend: BackendFactory) -> tuple[Driver, ProcessLink]:
    link = ProcessLink("test", backend, functools.partial(make_scheduler, SchedulerSettings()))
    driver = Driver(link)
    driver.start()
    return driver, link


@pytest.fixture(params=["fake", "mlx"])
def backend(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> BackendFactory:
    if request.param == "fake":
        return functools.partial(FakeBackend, max_rows=4)
    return functools.partial(
        generation_backend, ModelSource("tiny", "folder", tiny_model("llama")), EngineSettings(max_batch=4)
    )


by_fake = pytest.mark.parametrize("backend", some(["fake", "mlx"], ["fake"]), indirect=True)
"""For what the link does whatever the backend is: a child with MLX takes seconds to start."""


@pytest.fixture
def running(backend: BackendFactory) -> Iterator[tuple[Driver, ProcessLink]]:
    driver, link = start(backend)
    yield driver, link
    if not driver.stopped:
        driver.stop()


def test_answers_equal_those_of_a_thread(running: tuple[Driver, ProcessLink], backend: BackendFactory) -> None:
    driver, _ = running
    submits = [Generate(number, (number, 1, 2), 6, logprobs=2 if number == 3 else None) for number in range(10)]
    answers = driver.run(*submits)
    with engine(backend) as thread:
        assert thread.run(*submits) == answers
    assert len(driver.logprobs[3]) == 6
    assert all(isinstance(logprob, TokenLogprob) for logprob in driver.logprobs[3])


@by_fake
def test_it_cancels_and_stops(running: tuple[Driver, ProcessLink]) -> None:
    driver, link = running
    driver.post(Generate(1, (1, 2), 100_000))
    driver.wait(lambda: 1 in driver.tokens)
    driver.post(Cancel(1))
    driver.wait_ended(1)
    end = driver.ends[1][0]
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.CANCELLED
    driver.stop()
    with pytest.raises(EngineGone):
        driver.post(Generate(2, (1,), 1))
    assert link.join(1)


def test_requests_of_a_killed_child_fail_at_once(running: tuple[Driver, ProcessLink]) -> None:
    driver, link = running
    for number in range(6):
        driver.post(Generate(number, (1, 2), 100_000))
    driver.wait(lambda: 0 in driver.tokens)
    os.kill(pid_of(link), signal.SIGKILL)
    driver.wait(lambda: driver.stopped)
    ends = [driver.ends[number][0] for number in range(6)]
    assert all(isinstance(end, Failed) and end.gone and "signal 9" in end.message for end in ends)
    with pytest.raises(EngineGone, match="signal 9"):
        driver.post(Generate(99, (1,), 1))


@by_fake
def test_sigterm_to_the_group_does_not_end_an_engine(running: tuple[Driver, ProcessLink]) -> None:
    driver, link = running
    os.kill(pid_of(link), signal.SIGTERM)
    os.kill(pid_of(link), signal.SIGINT)
    assert len(driver.run(Generate(1, (1, 2), 5))[0]) == 5


def test_a_model_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    source = ModelSource("x", "folder", tmp_path / "nothing")
    link = ProcessLink(
        "x",
        functools.partial(generation_backend, source, EngineSettings()),
        functools.partial(make_scheduler, SchedulerSettings()),
    )
    driver = Driver(link)
    driver.post(Generate(1, (1,), 1))
    link.start_soon(driver.batches.put)
    driver.wait(lambda: driver.stopped)
    assert "nothing" in (driver.load_error or "")
    assert isinstance(driver.ends[1][0], Failed)
    assert link.join(10)


def test_a_child_that_dies_while_loading_fails_the_load() -> None:
    link = ProcessLink("x", exit_at_once, functools.partial(make_scheduler, SchedulerSettings()))
    driver = Driver(link)
    link.start_soon(driver.batches.put)
    driver.wait(lambda: driver.stopped)
    assert driver.load_error == "the engine's process ended with code 3"


@by_fake
def test_no_thread_or_child_is_left(backend: BackendFactory) -> None:
    before = threading.active_count()
    for _ in range(3):
        driver, link = start(backend)
        driver.run(Generate(1, (1, 2), 3))
        pid = pid_of(link)
        driver.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert threading.active_count() <= before + 1, "the writer of the last link may still be ending"


def test_messages_can_be_pickled() -> None:
    facts = GenerationFacts(1, 2, 3, 4, "float32", "cpu", ("note",))
    events = [
        Tokens(1, (5, 6)),
        Tokens(2, (7,), (TokenLogprob(7, -0.5, ((7, -0.5),)),)),
        Generated(1, FinishReason.STOP, Usage(3, 4)),
        Failed(2, "why", gone=True),
        LoadFailed("no"),
        Stopped(),
    ]
    for message in (*events, facts):
        assert pickle.loads(pickle.dumps(message)) == message
    submit = Generate(1, (1, 2, 3), 4, stop_tokens=frozenset({9}), logprobs=0)
    assert pickle.loads(pickle.dumps(submit)) == submit


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: reads /proc")
def test_an_engine_process_gets_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    children_find_us(monkeypatch)
    monkeypatch.setenv("MILLSTREAM_API_KEY", "sk-secret")
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    link = ProcessLink("test", DigestBackend, DigestScheduler)
    driver = Driver(link)
    driver.start()
    try:
        environment = Path(f"/proc/{pid_of(link)}/environ").read_bytes()
    finally:
        driver.stop()
    assert b"PATH=" in environment and b"PYTHONPATH=" in environment
    assert b"secret" not in environment
