"""Bursts at load: streams that start together, by a real scheduler on a fake backend."""

from __future__ import annotations

import pytest

from millstream.backend.generation.bursts import BURSTS, OUTPUT, PROMPT, run_bursts
from millstream.engine.generation.plan import Plan, StepResult
from millstream.engine.generation.scheduler import GenerationScheduler
from support.fake import FakeBackend

ROWS = 8


class Ticking(FakeBackend):
    """Each step takes a second, on a clock of its own."""

    clock = 0.0
    resets = 0

    def step(self, plan: Plan) -> StepResult:
        self.clock += 1.0
        return super().step(plan)

    def reset(self) -> None:
        self.resets += 1
        super().reset()


def run(backend: Ticking, seconds: float) -> int:
    scheduler = GenerationScheduler(max_rows=ROWS, prefill_tokens=512)
    return run_bursts(backend, scheduler, rows=ROWS, vocab_size=50, seconds=seconds, now=lambda: backend.clock)


def test_every_stream_has_two_answers_and_nothing_stays() -> None:
    backend = Ticking(max_rows=ROWS)
    assert run(backend, 10_000.0) == len(BURSTS)
    requests = {chunk.request for plan in backend.plans for chunk in plan.prefill}
    assert len(requests) == 2 * ROWS * len(BURSTS)
    assert len({request.prompt for request in requests}) == len(requests), "none has the prompt of another"
    assert {request.max_tokens for request in requests} == {OUTPUT}
    burst_of = lambda request: request.request_id // (2 * ROWS)  # noqa: E731
    for number, (_, shared) in enumerate(BURSTS):
        prompts = [request.prompt for request in requests if burst_of(request) == number]
        assert len({prompt[:shared] for prompt in prompts}) == 1
        assert all(PROMPT[0] <= len(prompt) - shared <= PROMPT[1] for prompt in prompts)
    assert max(len(plan.decode) for plan in backend.plans) == ROWS, "all rows decode together"
    assert backend.resets == 1 and not backend.rows and not backend.progress


@pytest.mark.parametrize("seconds", [1.0, 45.0])
def test_they_end_when_their_time_is_over(seconds: float) -> None:
    """Rows are left in the middle of an answer: the backend drops them."""
    backend = Ticking(max_rows=ROWS)
    done = run(backend, seconds)
    assert backend.clock == seconds and done < len(BURSTS)
    assert backend.resets == 1 and not backend.rows and not backend.progress
