"""Chunks that are evaluated in parts: each array once, in order, whatever comes between."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.prefill import deferred
from millstream.backend.generation.prefill.deferred import PARTS, DeferredChunks
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, Prefill

Done = list[tuple[str, list[int]]]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Done:
    """What was evaluated, and whether it was waited for."""
    found: Done = []

    class Recorder:
        sum = staticmethod(mx.sum)

        def eval(self, arrays: list[mx.array] | mx.array) -> None:
            found.append(
                ("waited", [int(array.item()) for array in (arrays if isinstance(arrays, list) else [arrays])])
            )

        def async_eval(self, arrays: list[mx.array]) -> None:
            found.append(("under way", [int(array.item()) for array in arrays]))

    monkeypatch.setattr(deferred, "mx", Recorder())
    return found


def arrays(*numbers: int) -> list[mx.array]:
    return [mx.array(number) for number in numbers]


def test_beside_rows_a_chunk_is_built_in_one_step_and_evaluated_in_others(done: Done) -> None:
    subject = DeferredChunks(parts=3, in_turn=False)
    subject.evaluate(arrays(1, 2, 3, 4, 5), beside=True, whole=False)
    assert subject and done == []
    left = []
    for _ in range(4):
        subject.evaluate([], beside=True, whole=False)
        left.append(bool(subject))
    assert done == [("under way", [1, 2]), ("under way", [3, 4]), ("under way", [5])]
    assert left == [True, True, False, False]


@pytest.mark.parametrize(
    ("parts", "beside", "whole"),
    [(1, True, False), (3, False, False), (3, True, True), (1, False, True)],
)
def test_else_it_takes_one(parts: int, beside: bool, whole: bool, done: Done) -> None:
    subject = DeferredChunks(parts=parts, in_turn=False)
    subject.evaluate(arrays(1, 2, 3), beside=beside, whole=whole)
    assert not subject and done == [("under way" if beside else "waited", [1, 2, 3])]


@pytest.mark.parametrize("beside", [True, False])
def test_the_next_chunk_takes_what_was_left_with_it(beside: bool, done: Done) -> None:
    subject = DeferredChunks(parts=2, in_turn=False)
    subject.evaluate(arrays(1, 2), beside=True, whole=False)
    subject.evaluate([], beside=True, whole=False)
    subject.evaluate(arrays(3, 4), beside=beside, whole=False)
    assert not subject and [numbers for _, numbers in done] == [[1], [2, 3, 4]]


def test_in_turn_a_chunk_waits_for_the_one_before(done: Done) -> None:
    """And holds none of it: what is waited for is a number of its own."""
    subject = DeferredChunks(parts=1, in_turn=True)
    for numbers in ((1, 2), (3, 4)):
        subject.evaluate(arrays(*numbers), beside=True, whole=False)
    assert done == [("under way", [1, 2, 2]), ("waited", [2]), ("under way", [3, 4, 4])]
    subject.clear()
    subject.evaluate(arrays(5), beside=False, whole=True)
    assert done[3:] == [("waited", [5])]


def test_without_rows_what_was_left_is_evaluated_at_once(done: Done) -> None:
    subject = DeferredChunks(parts=3, in_turn=False)
    subject.evaluate(arrays(1, 2, 3), beside=True, whole=False)
    subject.evaluate([], beside=False, whole=False)
    assert not subject and done == [("waited", [1, 2, 3])]


def test_what_was_left_can_be_forgotten(done: Done) -> None:
    subject = DeferredChunks(parts=2, in_turn=False)
    subject.evaluate(arrays(1, 2), beside=True, whole=False)
    subject.clear()
    assert not subject and done == []


def test_a_backend_says_that_it_is_reading(tiny_model: Callable[[str], Path]) -> None:
    """Only beside rows, only as on a GPU, and of short prompts never."""

    def reading(steps: list[Plan], **changes: Any) -> list[bool]:
        def own() -> list[bool]:
            backend = MlxGenerationBackend(GenerationSettings("folder", tiny_model("llama"), max_rows=4, **changes))
            backend.load()
            try:
                return [backend.step(plan).prefilling for plan in steps]
            finally:
                backend.close()

        with ThreadPoolExecutor(1) as owner:
            return owner.submit(own).result()

    short, long = Generate(1, (1, 2, 3), 9), Generate(2, tuple(range(40)), 9)
    first, last = Prefill(long, 0, 20), Prefill(long, 20, 39)
    beside = [Plan(decode=(1,))]
    steps = [
        Plan(prefill=(Prefill(short, 0, 2),)),
        Plan(decode=(1,), prefill=(first,)),
        *(beside * PARTS),
        Plan(decode=(1,), prefill=(last,)),
        *(beside * PARTS),
        Plan(decode=(1, 2), prefill=(Prefill(Generate(3, (4, 5, 6), 9), 0, 2),)),
        Plan(decode=(1, 2, 3)),
    ]
    a_chunk = [True] * PARTS + [False]
    assert reading(steps, like_gpu=True) == [False, *a_chunk, *a_chunk, False, False]
    assert not any(reading(steps))
