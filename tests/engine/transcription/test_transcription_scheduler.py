"""Which windows run next: every one once, within bounds, fair between requests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.messages import Event, Failed
from millstream.engine.transcription.messages import (
    AddWindows,
    Options,
    Transcribe,
    Transcribed,
    Window,
    WindowText,
)
from millstream.engine.transcription.plan import TranscriptionPlan, TranscriptionResult
from millstream.engine.transcription.scheduler import TranscriptionScheduler
from support.transcriptions import facts

Row = tuple[int, int]


class Engine:
    """Runs plans: each row takes as many steps as its first sample says."""

    def __init__(self, scheduler: TranscriptionScheduler, *, language: str | None = None) -> None:
        self.scheduler = scheduler
        self.language = language
        self.rows: dict[Row, int] = {}
        self.most = 0
        self.events: list[Event] = []
        self.started: list[Row] = []

    def step(self) -> TranscriptionPlan:
        plan = self.scheduler.plan()
        self.events += self.scheduler.started()
        for key in plan.drop:
            del self.rows[key]
        for start in plan.start:
            self.rows[start.key] = int(np.frombuffer(start.samples, np.float32)[0])
            self.started.append(start.key)
        self.most = max(self.most, len(self.rows))
        self.rows = {key: left - 1 for key, left in self.rows.items()}
        done = [key for key, left in self.rows.items() if left <= 0]
        for key in done:
            del self.rows[key]
        found = [(start.request_id, self.language) for start in plan.start if start.options.language is None]
        languages = tuple((number, code) for number, code in found if code is not None)
        result = TranscriptionResult(tuple(WindowText(*key, segments=()) for key in done), languages)
        self.events += self.scheduler.advance(plan, result)
        return plan

    def run(self) -> None:
        for _ in range(10_000):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("it does not end")


def windows(steps: Iterable[int], first: int = 0) -> tuple[Window, ...]:
    return tuple(Window(first + n, np.array([each], np.float32).tobytes()) for n, each in enumerate(steps))


requests = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=6)


@given(requests, st.integers(1, 5), st.integers(1, 3))
def test_every_window_runs_once_and_every_request_ends_once(asked: list[list[int]], rows: int, start: int) -> None:
    engine = Engine(TranscriptionScheduler(facts(rows=rows, start=start)))
    for number, steps in enumerate(asked):
        engine.scheduler.submit(Transcribe(number, Options(), windows(steps)))
        engine.step()
    engine.run()
    assert sorted(engine.started) == [
        (number, each) for number, steps in enumerate(asked) for each in range(len(steps))
    ]
    texts = [(event.request_id, event.index) for event in engine.events if isinstance(event, WindowText)]
    assert sorted(texts) == sorted(engine.started)
    ends = [event.request_id for event in engine.events if isinstance(event, Transcribed)]
    assert sorted(ends) == list(range(len(asked)))
    assert engine.most <= rows


@given(requests, st.sets(st.integers(0, 5)), st.integers(0, 20))
def test_a_cancel_frees_the_rows_of_its_request_alone(asked: list[list[int]], gone: set[int], after: int) -> None:
    engine = Engine(TranscriptionScheduler(facts(rows=3)))
    for number, steps in enumerate(asked):
        engine.scheduler.submit(Transcribe(number, Options(), windows(steps)))
    for _ in range(after):
        if not engine.scheduler.idle:
            engine.step()
    for number in gone:
        engine.events += engine.scheduler.cancel(number)
    engine.run()
    ends = [event.request_id for event in engine.events if isinstance(event, Transcribed)]
    assert sorted(ends) == list(range(len(asked)))
    assert not engine.rows
    staying = {number for number in range(len(asked)) if number not in gone}
    texts = {(event.request_id, event.index) for event in engine.events if isinstance(event, WindowText)}
    assert {key for key in texts if key[0] in staying} == {
        (number, each) for number in staying for each in range(len(asked[number]))
    }


def test_windows_that_come_later_belong_to_their_request() -> None:
    engine = Engine(TranscriptionScheduler(facts()))
    engine.scheduler.submit(Transcribe(1, Options(), windows([1]), complete=False))
    engine.run()
    assert engine.scheduler.idle and not [event for event in engine.events if isinstance(event, Transcribed)]
    engine.events += engine.scheduler.handle(AddWindows(1, windows([1, 1], first=1)))
    engine.run()
    engine.events += engine.scheduler.handle(AddWindows(1, (), complete=True))
    assert engine.events[-1] == Transcribed(1)
    assert [event.index for event in engine.events if isinstance(event, WindowText)] == [0, 1, 2]
    assert list(engine.scheduler.handle(AddWindows(1, windows([1])))) == [] and engine.scheduler.idle


def test_a_newcomer_waits_for_one_row_not_for_an_hour_of_audio() -> None:
    engine = Engine(TranscriptionScheduler(facts(rows=4, start=4)))
    engine.scheduler.submit(Transcribe(1, Options(), windows([5] * 100)))
    engine.step()
    assert len(engine.rows) == 4
    engine.scheduler.submit(Transcribe(2, Options(), windows([5] * 3)))
    while not [event for event in engine.events if event == Transcribed(2)]:
        engine.step()
    assert len([key for key in engine.started if key[0] == 1]) <= 9


def test_rows_are_shared_out_evenly() -> None:
    engine = Engine(TranscriptionScheduler(facts(rows=6, start=6)))
    for number in range(3):
        engine.scheduler.submit(Transcribe(number, Options(), windows([9] * 10)))
    plan = engine.step()
    assert sorted(start.request_id for start in plan.start) == [0, 0, 1, 1, 2, 2]


def test_the_first_window_finds_the_language_for_all() -> None:
    engine = Engine(TranscriptionScheduler(facts(detects_language=True, start=4)), language="de")
    engine.scheduler.submit(Transcribe(1, Options(), windows([5] * 4)))
    engine.scheduler.submit(Transcribe(2, Options(language="en"), windows([5] * 4)))
    first = engine.step()
    assert sorted(start.key for start in first.start) == [(1, 0), (2, 0), (2, 1), (2, 2)]
    engine.run()
    plans = engine.started
    assert len(plans) == 8
    engine.scheduler.submit(Transcribe(3, Options(), windows([1, 1])))
    assert [start.options.language for start in engine.step().start] == [None]
    assert [start.options.language for start in engine.step().start] == ["de"]


def test_a_failed_step_fails_the_requests_that_have_rows() -> None:
    engine = Engine(TranscriptionScheduler(facts(rows=1)))
    engine.scheduler.submit(Transcribe(1, Options(), windows([5])))
    engine.scheduler.submit(Transcribe(2, Options(), windows([5])))
    engine.scheduler.plan()
    assert list(engine.scheduler.fail("no")) == [Failed(1, "no")]
    engine.rows.clear()
    engine.run()
    assert engine.events[-1] == Transcribed(2)
    engine.scheduler.submit(Transcribe(3, Options(), windows([5])))
    engine.scheduler.submit(Transcribe(4, Options(), windows([5])), held=True)
    assert list(engine.scheduler.fail_all("bye")) == [Failed(4, "bye", gone=True), Failed(3, "bye", gone=True)]


def test_held_requests_wait_for_their_release() -> None:
    engine = Engine(TranscriptionScheduler(facts()))
    engine.scheduler.submit(Transcribe(1, Options(), windows([1]), complete=False), held=True)
    engine.scheduler.handle(AddWindows(1, windows([1], first=1), complete=True))
    assert engine.scheduler.idle
    engine.scheduler.release(1)
    engine.run()
    assert sorted(engine.started) == [(1, 0), (1, 1)] and engine.events[-1] == Transcribed(1)
