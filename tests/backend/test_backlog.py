"""Chunks that are evaluated by halves: each array once, in order, whatever comes between."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from millstream.backend import backlog
from millstream.backend.backlog import Backlog
from millstream.backend.text_model import MlxTextBackend, TextModelSettings
from millstream.engine.backend import Plan, Prefill
from millstream.engine.messages import Submit

Done = list[tuple[str, list[int]]]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Done:
    """What was evaluated, and whether it was waited for."""
    found: Done = []

    class Recorder:
        def eval(self, arrays: list[mx.array]) -> None:
            found.append(("waited", [int(array.item()) for array in arrays]))

        def async_eval(self, arrays: list[mx.array]) -> None:
            found.append(("under way", [int(array.item()) for array in arrays]))

    monkeypatch.setattr(backlog, "mx", Recorder())
    return found


def arrays(*numbers: int) -> list[mx.array]:
    return [mx.array(number) for number in numbers]


def test_beside_rows_a_chunk_takes_two_steps(done: Done) -> None:
    subject = Backlog(halves=True)
    subject.evaluate(arrays(1, 2, 3), beside=True, whole=False)
    assert subject and done == [("under way", [1, 2])]
    subject.evaluate([], beside=True, whole=False)
    assert not subject and done[1:] == [("under way", [3])]
    subject.evaluate([], beside=True, whole=False)
    assert len(done) == 2


@pytest.mark.parametrize(
    ("halves", "beside", "whole"),
    [(False, True, False), (True, False, False), (True, True, True), (False, False, True)],
)
def test_else_it_takes_one(halves: bool, beside: bool, whole: bool, done: Done) -> None:
    subject = Backlog(halves=halves)
    subject.evaluate(arrays(1, 2, 3), beside=beside, whole=whole)
    assert not subject and done == [("under way" if beside else "waited", [1, 2, 3])]


@pytest.mark.parametrize("beside", [True, False])
def test_the_next_chunk_takes_what_was_left_with_it(beside: bool, done: Done) -> None:
    subject = Backlog(halves=True)
    subject.evaluate(arrays(1, 2), beside=True, whole=False)
    subject.evaluate(arrays(3, 4), beside=beside, whole=False)
    assert not subject and [number for _, numbers in done for number in numbers] == [1, 2, 3, 4]


def test_what_was_left_can_be_forgotten(done: Done) -> None:
    subject = Backlog(halves=True)
    subject.evaluate(arrays(1, 2), beside=True, whole=False)
    subject.clear()
    assert not subject


def test_a_backend_says_that_it_is_reading(tiny_model: Callable[[str], Path]) -> None:
    """Only beside rows, only as on a GPU, and not when the row joins next."""

    def reading(steps: list[Plan], **changes: Any) -> list[bool]:
        def own() -> list[bool]:
            backend = MlxTextBackend(TextModelSettings("folder", tiny_model("llama"), max_rows=4, **changes))
            backend.load()
            try:
                return [backend.step(plan).reading for plan in steps]
            finally:
                backend.close()

        with ThreadPoolExecutor(1) as owner:
            return owner.submit(own).result()

    short, long = Submit(1, (1, 2, 3), 9), Submit(2, tuple(range(40)), 9)
    steps = [
        Plan(prefill=(Prefill(short, 0, 2),)),
        Plan(decode=(1,), prefill=(Prefill(long, 0, 10),)),
        Plan(decode=(1,)),
        Plan(decode=(1,), prefill=(Prefill(long, 10, 20),)),
        Plan(decode=(1,), prefill=(Prefill(long, 20, 30),)),
        Plan(decode=(1,), prefill=(Prefill(long, 30, 39),)),
        Plan(decode=(1, 2)),
    ]
    assert reading(steps, like_gpu=True) == [False, True, False, True, False, False, False]
    assert not any(reading(steps))
