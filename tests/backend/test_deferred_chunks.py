"""Deferred chunks: each array is evaluated once and in order, whatever happens in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.prefill import deferred
from millstream.backend.generation.prefill.deferred import STEPS_PER_CHUNK, DeferredChunks
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, Prefill

Evaluated = list[tuple[str, list[int]]]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Evaluated:
    """The arrays that were evaluated, and whether the call waited for them."""
    found: Evaluated = []

    class Recorder:
        sum = staticmethod(mx.sum)

        def eval(self, arrays: list[mx.array] | mx.array) -> None:
            found.append(
                ("waited", [int(array.item()) for array in (arrays if isinstance(arrays, list) else [arrays])])
            )

        def async_eval(self, arrays: list[mx.array]) -> None:
            found.append(("started", [int(array.item()) for array in arrays]))

    monkeypatch.setattr(deferred, "mx", Recorder())
    return found


def passes(*numbers: int) -> list[list[mx.array]]:
    """One forward pass."""
    return [[mx.array(number) for number in numbers]]


def test_with_running_rows_one_chunk_is_evaluated_over_several_steps(done: Evaluated) -> None:
    deferred_chunks = DeferredChunks(steps_per_chunk=3, wait_for_previous=False)
    deferred_chunks.evaluate(passes(1, 2, 3, 4, 5), has_running_rows=True, complete_now=False)
    assert deferred_chunks and done == []
    pending = []
    for _ in range(4):
        deferred_chunks.evaluate([], has_running_rows=True, complete_now=False)
        pending.append(bool(deferred_chunks))
    assert done == [("started", [1, 2]), ("started", [3, 4]), ("started", [5])]
    assert pending == [True, True, False, False]


@pytest.mark.parametrize(
    ("steps_per_chunk", "has_running_rows", "complete_now"),
    [(1, True, False), (3, False, False), (3, True, True), (1, False, True)],
)
def test_otherwise_it_takes_one_step(
    steps_per_chunk: int, has_running_rows: bool, complete_now: bool, done: Evaluated
) -> None:
    deferred_chunks = DeferredChunks(steps_per_chunk=steps_per_chunk, wait_for_previous=False)
    deferred_chunks.evaluate(passes(1, 2, 3), has_running_rows=has_running_rows, complete_now=complete_now)
    assert not deferred_chunks and done == [("started" if has_running_rows else "waited", [1, 2, 3])]


@pytest.mark.parametrize("has_running_rows", [True, False])
def test_a_new_chunk_completes_the_deferred_one(has_running_rows: bool, done: Evaluated) -> None:
    deferred_chunks = DeferredChunks(steps_per_chunk=2, wait_for_previous=False)
    deferred_chunks.evaluate(passes(1, 2), has_running_rows=True, complete_now=False)
    deferred_chunks.evaluate([], has_running_rows=True, complete_now=False)
    deferred_chunks.evaluate(passes(3, 4), has_running_rows=has_running_rows, complete_now=False)
    assert not deferred_chunks and [numbers for _, numbers in done] == [[1], [2, 3, 4]]


def test_one_chunk_waits_for_the_previous_one(done: Evaluated) -> None:
    """Without holding its arrays: it waits for a scalar of its own."""
    deferred_chunks = DeferredChunks(steps_per_chunk=1, wait_for_previous=True)
    for numbers in ((1, 2), (3, 4)):
        deferred_chunks.evaluate(passes(*numbers), has_running_rows=True, complete_now=False)
    assert done == [("started", [1, 2, 2]), ("waited", [2]), ("started", [3, 4, 4])]
    deferred_chunks.clear()
    deferred_chunks.evaluate(passes(5), has_running_rows=False, complete_now=True)
    assert done[3:] == [("waited", [5])]


def test_without_running_rows_the_rest_is_evaluated_at_once(done: Evaluated) -> None:
    deferred_chunks = DeferredChunks(steps_per_chunk=3, wait_for_previous=False)
    deferred_chunks.evaluate(passes(1, 2, 3), has_running_rows=True, complete_now=False)
    deferred_chunks.evaluate([], has_running_rows=False, complete_now=False)
    assert not deferred_chunks and done == [("waited", [1, 2, 3])]


def test_every_part_has_a_share_of_every_pass(done: Evaluated) -> None:
    """Else a long chunk after a short one would be computed in the last steps only."""
    deferred_chunks = DeferredChunks(steps_per_chunk=2, wait_for_previous=False)
    chunks = [*passes(1, 2, 3, 4), *passes(), *passes(5, 6, 7)]
    deferred_chunks.evaluate(chunks, has_running_rows=True, complete_now=False)
    assert deferred_chunks.append([mx.array(9)])
    for _ in range(2):
        deferred_chunks.evaluate([], has_running_rows=True, complete_now=False)
    assert done == [("started", [1, 2, 5, 6]), ("started", [3, 4, 7, 9])]


def test_copies_of_a_saved_prompt_are_spread_over_the_steps_that_follow(done: Evaluated) -> None:
    deferred_chunks = DeferredChunks(steps_per_chunk=4, wait_for_previous=False)
    assert deferred_chunks.append([mx.array(number) for number in range(5)])
    states = []
    for _ in range(4):
        deferred_chunks.evaluate([], has_running_rows=True, complete_now=False)
        states.append((bool(deferred_chunks), deferred_chunks.saving, len(done)))
    assert states == [(False, True, 0), (False, True, 1), (False, False, 2), (False, False, 2)]
    assert done == [("started", [0, 1, 2]), ("started", [3, 4])]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_chunk_that_begins_takes_the_rest_of_the_copies_along(steps: int, done: Evaluated) -> None:
    """`steps`: how many the copies have had before."""
    deferred_chunks = DeferredChunks(steps_per_chunk=2, wait_for_previous=False)
    deferred_chunks.append([mx.array(number) for number in (8, 9)])
    for _ in range(steps):
        deferred_chunks.evaluate([], has_running_rows=True, complete_now=False)
    before = len(done)
    deferred_chunks.evaluate(passes(1, 2, 3, 4), has_running_rows=True, complete_now=False, parts=3)
    assert deferred_chunks and not deferred_chunks.saving and len(done) == before, "a chunk is built in this step"
    while deferred_chunks:
        deferred_chunks.evaluate([], has_running_rows=True, complete_now=False)
    assert not deferred_chunks.saving
    numbers = [number for _, numbers in done for number in numbers]
    assert sorted(numbers) == [1, 2, 3, 4, 8, 9] and [each for each in numbers if each < 8] == [1, 2, 3, 4]
    assert max(len(numbers) for _, numbers in done) < 4, "they are spread"


@pytest.mark.parametrize(("has_running_rows", "complete_now"), [(False, False), (True, True)])
def test_copies_are_made_at_once_with_all_the_rest(has_running_rows: bool, complete_now: bool, done: Evaluated) -> None:
    deferred_chunks = DeferredChunks(steps_per_chunk=2, wait_for_previous=False)
    deferred_chunks.append([mx.array(9)])
    deferred_chunks.evaluate(passes(1), has_running_rows=has_running_rows, complete_now=complete_now)
    assert [numbers for _, numbers in done] == [[1, 9]] and not deferred_chunks and not deferred_chunks.saving
    deferred_chunks.append([mx.array(8)])
    deferred_chunks.clear()
    deferred_chunks.evaluate([], has_running_rows=False, complete_now=False)
    assert len(done) == 1, "nobody wants the copies of a batch that is gone"


def test_where_nothing_is_deferred_copies_are_made_by_who_wants_them() -> None:
    assert not DeferredChunks(steps_per_chunk=1, wait_for_previous=True).append([mx.array(8)])


def test_clear_drops_the_rest(done: Evaluated) -> None:
    deferred_chunks = DeferredChunks(steps_per_chunk=2, wait_for_previous=False)
    deferred_chunks.evaluate(passes(1, 2), has_running_rows=True, complete_now=False)
    deferred_chunks.clear()
    assert not deferred_chunks and done == []


def test_the_backend_reports_that_it_is_prefilling(tiny_model: Callable[[str], Path]) -> None:
    """Only with running rows, only as on a GPU, and not if the plan must be completed."""

    def prefilling(steps: list[Plan], **changes: Any) -> list[bool]:
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
    decode_only = [Plan(decode=(1,))]
    steps = [
        Plan(prefill=(Prefill(short, 0, 2),)),
        Plan(decode=(1,), prefill=(first,)),
        *(decode_only * STEPS_PER_CHUNK),
        Plan(decode=(1,), prefill=(last,)),
        *(decode_only * STEPS_PER_CHUNK),
        Plan(decode=(1, 2), prefill=(Prefill(Generate(3, (4, 5, 6), 9), 0, 2),), complete_prefill=True),
        Plan(decode=(1, 2, 3)),
    ]
    parts = min(STEPS_PER_CHUNK + 1, json.loads((tiny_model("llama") / "config.json").read_text())["num_hidden_layers"])
    one_chunk = [True] * (parts - 1) + [False] * (STEPS_PER_CHUNK + 2 - parts)
    assert prefilling(steps, like_gpu=True) == [False, *one_chunk, *one_chunk, False, False]
    assert not any(prefilling(steps))
