"""SpecPrefill as the scheduler plans it: the draft reads a prompt, the target reads what was chosen of it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.generation.messages import Generate, Generated
from millstream.engine.generation.plan import Plan, Prefill, RowOutput, StepResult
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.sparse_prompt import BEGINNING, ENDING, GRID, SparsePrompt, after, choose, length
from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.index import PrefixIndex
from millstream.model_facts import SpecPrefillFacts

FACTS = SpecPrefillFacts(share=0.3, least=1000, cost=0.25)


def pieces(tokens: int) -> int:
    return -(-tokens // GRID)


@given(
    end=st.integers(1, 4000),
    cached=st.integers(0, 4000),
    share=st.floats(0.01, 1.0),
    resumed=st.integers(0, 300),
    seed=st.integers(0, 9),
)
def test_chosen_spans_are_in_order_and_hold_both_ends(
    end: int, cached: int, share: float, resumed: int, seed: int
) -> None:
    start = min(cached, end)
    draw = random.Random(seed)
    importance = [draw.random() for _ in range(pieces(end) + 1)]
    spans = choose(importance, share, start, end, resumed)
    assert all(first < beyond for first, beyond in spans)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(spans))
    held = {token for first, beyond in spans for token in range(first, beyond)}
    assert held <= set(range(start, end))
    assert {token for token in range(start, end) if token < BEGINNING or token >= end - ENDING - resumed} <= held
    always = BEGINNING + ENDING + resumed + 4 * GRID
    assert len(held) <= share * (end - start) + always


def test_the_most_important_pieces_are_chosen() -> None:
    importance = [0.0] * pieces(8000)
    importance[100] = importance[37] = importance[38] = 1.0
    spans = choose(importance, 0.06, 0, 8000)
    assert (37 * GRID, 39 * GRID) in spans
    assert (100 * GRID, 101 * GRID) in spans


def test_what_was_chosen_is_read_in_chunks_and_only_once() -> None:
    sparse = SparsePrompt(FACTS)
    draw = random.Random(1)
    sparse.select([draw.random() for _ in range(pieces(5000))], 0, 4999)
    assert sparse.kept is not None
    at, read = 0, []
    while at < 4999:
        spans = sparse.next_reading(at, 200, 4999)
        assert length(spans) <= 200
        read += [token for first, beyond in spans for token in range(first, beyond)]
        assert sparse.work(at, 4999) == length(after(sparse.kept, at, 4999))
        at = spans[-1][1]
    assert read == [token for first, beyond in sparse.kept for token in range(first, beyond)]
    assert sparse.skipped(0, 4999) == 4999 - len(read)


class Pretend:
    """A backend that reads in no time, and gives every row the same tokens."""

    def __init__(self) -> None:
        self.steps: list[Plan] = []
        self.scored: dict[int, int] = {}
        self.read: dict[int, list[tuple[int, int]]] = {}

    def step(self, plan: Plan) -> StepResult:
        self.steps.append(plan)
        for request_id in plan.drop:
            self.read.pop(request_id, None)
            self.scored.pop(request_id, None)
        importance = []
        for chunk in plan.prefill:
            if chunk.scores:
                importance += self._score(chunk)
            else:
                self.read.setdefault(chunk.request.request_id, []).extend(chunk.spans or ((chunk.start, chunk.end),))
        return StepResult(
            tuple(RowOutput(request_id, (7,)) for request_id in plan.decode), importance=tuple(importance)
        )

    def _score(self, chunk: Prefill) -> list[tuple[int, tuple[float, ...]]]:
        number, tokens = chunk.request.request_id, len(chunk.request.prompt)
        assert self.scored.get(number, 0) == chunk.start
        self.scored[number] = chunk.end
        if chunk.end < tokens:
            return []
        return [(number, tuple(float(index % 5) for index in range(pieces(tokens))))]


def scheduler(facts: SpecPrefillFacts | None = FACTS, cache: BlockPrefixCache | None = None) -> GenerationScheduler:
    return GenerationScheduler(max_rows=4, prefill_tokens=512, spec_prefill=facts, prefix_cache=cache)


def run(planner: GenerationScheduler, backend: Pretend, *submits: Generate, preempt: int = 0) -> dict[int, Generated]:
    for submit in submits:
        planner.submit(submit)
    ends: dict[int, Generated] = {}
    for number in range(400):
        if preempt and number % preempt == preempt - 1:
            planner.preempt(submits[-1].request_id)
        plan = planner.plan()
        for event in planner.advance(plan, backend.step(plan), 0.01):
            if isinstance(event, Generated):
                ends[event.request_id] = event
        if len(ends) == len(submits):
            return ends
    raise AssertionError("requests do not end")


def prompt(tokens: int, seed: int = 1) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(9, 90) for _ in range(tokens))


def test_the_draft_reads_all_then_the_target_a_part() -> None:
    backend = Pretend()
    ends = run(scheduler(), backend, Generate(1, prompt(6000), 5, spec_prefill=True))
    assert backend.scored[1] == 6000
    read = length(backend.read[1])
    assert 0.28 * 6000 < read < 0.32 * 6000
    assert backend.read[1][-1][1] == 5999
    assert ends[1].usage.prompt_tokens == 6000
    assert ends[1].usage.skipped_tokens == 5999 - read
    scoring = [chunk.end - chunk.start for plan in backend.steps for chunk in plan.prefill if chunk.scores]
    assert max(scoring) == 512 / FACTS.cost


@pytest.mark.parametrize("number", range(4))
def test_prompts_that_are_read_as_a_whole(number: int) -> None:
    submit = [
        Generate(1, prompt(6000), 5),
        Generate(1, prompt(1000), 5, spec_prefill=True),
        Generate(1, prompt(6000), 5, spec_prefill=True, prompt_logprobs=1),
        Generate(1, prompt(6000), 5, spec_prefill=True),
    ][number]
    backend = Pretend()
    ends = run(scheduler(None if number == 3 else FACTS), backend, submit)
    assert not backend.scored
    assert length(backend.read[1]) == len(submit.prompt) - 1
    assert ends[1].usage.skipped_tokens == 0


def test_other_requests_go_on_beside_it() -> None:
    backend = Pretend()
    ends = run(
        scheduler(),
        backend,
        Generate(1, prompt(30), 90),
        Generate(2, prompt(6000, 2), 5, spec_prefill=True),
        Generate(3, prompt(30, 3), 5),
    )
    assert set(ends) == {1, 2, 3}
    both = [plan for plan in backend.steps if plan.prefill and plan.decode]
    assert any(chunk.scores for plan in both for chunk in plan.prefill)


@pytest.mark.parametrize("preempt", [2, 3, 5, 9, 14, 16])
def test_a_request_that_is_preempted_reads_the_same_again(preempt: int) -> None:
    alone, backend = Pretend(), Pretend()
    submit = Generate(1, prompt(6000), 60, spec_prefill=True)
    run(scheduler(), alone, submit)
    planner = scheduler()
    planner.submit(submit)
    ended: list[Generated] = []
    for number in range(200):
        if number == preempt:
            planner.preempt(1)
        plan = planner.plan()
        ended += [event for event in planner.advance(plan, backend.step(plan), 0.01) if isinstance(event, Generated)]
        if ended:
            break
    assert ended[0].usage.completion_tokens == 60
    tokens = [token for first, beyond in backend.read[1] for token in range(first, beyond)]
    wanted = [token for first, beyond in alone.read[1] for token in range(first, beyond)]
    assert tokens[: len(wanted)] == wanted
    assert tokens[len(wanted) :] == list(range(5999, 5999 + len(tokens) - len(wanted)))


def test_nothing_of_it_is_saved_but_what_is_cached_is_used() -> None:
    cache = BlockPrefixCache(PrefixIndex(block=16, block_bytes=16, budget=10**9, least=1))
    planner, backend = scheduler(cache=cache), Pretend()
    run(planner, backend, Generate(1, prompt(6000), 5, spec_prefill=True))
    planner.plan()
    saved = [order for plan in backend.steps for order in plan.save]
    assert not saved
    shorter = (*prompt(2000), 91, 92)
    run(planner, backend, Generate(2, shorter, 5))
    assert [order for plan in backend.steps for order in plan.save]
    ends = run(planner, backend, Generate(3, prompt(6000), 5, spec_prefill=True))
    assert ends[3].usage.cached_tokens == 2000
    assert backend.read[3][0][0] >= 2000
    assert ends[3].usage.skipped_tokens == 3999 - length(backend.read[3])
    # What is left of this one is short.
    ends = run(planner, backend, Generate(4, (*prompt(2000), *prompt(500, 4)), 5, spec_prefill=True))
    assert ends[4].usage.skipped_tokens == 0
    assert length(backend.read[4]) == 2499 - ends[4].usage.cached_tokens


def test_one_that_leaves_while_it_is_scored_leaves_nothing() -> None:
    planner, backend = scheduler(), Pretend()
    planner.submit(Generate(1, prompt(60000), 5, spec_prefill=True))
    for _ in range(3):
        plan = planner.plan()
        planner.advance(plan, backend.step(plan), 0.01)
    planner.cancel(1)
    assert planner.plan().drop == (1,)
    assert planner.idle
