"""The scheduler: which requests run, in what order, and the events of each step."""

from __future__ import annotations

import pytest

from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.messages import Generate, Generated, PromptLogprobs, Tokens
from millstream.engine.generation.plan import ChunkLogprobs, Plan, Prefill, RowFailure, RowOutput, StepResult
from millstream.engine.generation.request import MOVES, IllegalMove, Request, State
from millstream.engine.generation.scheduler import SAVING_STEPS, GenerationScheduler
from millstream.engine.messages import Failed, Finished
from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.checkpoints import CheckpointPrefixCache
from millstream.engine.prefix_cache.index import PrefixIndex
from millstream.types import FinishReason, TokenLogprob, Usage


def scheduler(*, rows: int = 2, budget: int = 4) -> GenerationScheduler:
    return GenerationScheduler(max_rows=rows, prefill_tokens=budget)


def submit(number: int, length: int = 3, max_tokens: int = 5, stops: frozenset[int] = frozenset()) -> Generate:
    return Generate(number, tuple(range(length)), max_tokens, stop_tokens=stops)


def step(subject: GenerationScheduler, **outputs: tuple[int, ...]) -> tuple[Plan, list[object]]:
    """Plan and advance a step whose rows `r1`, `r2` … produce these tokens."""
    plan = subject.plan()
    rows = tuple(RowOutput(int(name[1:]), tokens) for name, tokens in outputs.items())
    return plan, list(subject.advance(plan, StepResult(rows)))


def test_a_prompt_is_cut_into_chunks_and_its_last_token_is_left_to_decode() -> None:
    subject = scheduler(budget=4)
    request = submit(1, length=10)
    subject.submit(request)
    chunks = [step(subject)[0].prefill for _ in range(3)]
    assert chunks == [(Prefill(request, 0, 4),), (Prefill(request, 4, 8),), (Prefill(request, 8, 9),)]
    assert [chunk[0].joins for chunk in chunks] == [False, False, True]
    assert step(subject)[0] == Plan(decode=(1,))


def test_rows_decode_in_every_step_during_a_long_prefill() -> None:
    subject = scheduler(budget=4)
    subject.submit(submit(1, length=1, max_tokens=100))
    step(subject)
    subject.submit(submit(2, length=100))
    for token in range(10):
        plan, events = step(subject, r1=(token,))
        assert plan.decode == (1,)
        assert sum(chunk.end - chunk.start for chunk in plan.prefill) == 4
        assert events == [Tokens(1, (token,))]


def test_the_budget_is_shared_oldest_first() -> None:
    subject = scheduler(rows=3, budget=4)
    for number in (1, 2, 3):
        subject.submit(submit(number, length=4))
    spans = [(chunk.request.request_id, chunk.start, chunk.end) for chunk in subject.plan().prefill]
    assert spans == [(1, 0, 3), (2, 0, 1)]


def test_while_rows_decode_prompts_are_read_one_after_the_other_and_a_short_one_overtakes() -> None:
    subject = GenerationScheduler(max_rows=5, prefill_tokens=10, chunk_sizer=ChunkSizer(most=3, least=3))
    subject.submit(submit(1, length=1, max_tokens=100))
    step(subject)
    for number, length in ((2, 8), (3, 3), (4, 40)):
        subject.submit(submit(number, length=length))
    plans = [step(subject, r1=(5,))[0] for _ in range(5)]
    spans = [[(chunk.request.request_id, chunk.start, chunk.end) for chunk in plan.prefill] for plan in plans]
    assert spans == [[(2, 0, 3)], [(3, 0, 2)], [(2, 3, 6)], [(2, 6, 7)], [(4, 0, 3)]]
    assert [plan.complete_prefill for plan in plans] == [False, True, False, False, False]
    for number in (1, 2, 3):
        subject.cancel(number)
    assert [(c.request.request_id, c.start, c.end) for c in subject.plan().prefill] == [(4, 3, 13)]


def test_rows_are_limited_and_the_queue_is_fifo() -> None:
    subject = scheduler(rows=2, budget=100)
    for number in (1, 2, 3, 4):
        subject.submit(submit(number, max_tokens=1))
    assert [chunk.request.request_id for chunk in step(subject)[0].prefill] == [1, 2]
    _, events = step(subject, r1=(9,), r2=(9,))
    assert [event.request_id for event in events if isinstance(event, Finished)] == [1, 2]
    plan, _ = step(subject)
    assert plan.drop == (1, 2)
    assert [chunk.request.request_id for chunk in plan.prefill] == [3, 4]


def test_a_stop_token_ends_the_row_and_is_counted_but_not_emitted() -> None:
    subject = scheduler()
    subject.submit(submit(1, stops=frozenset({7})))
    step(subject)
    _, events = step(subject, r1=(5, 7, 8))
    assert events == [Tokens(1, (5,)), Generated(1, FinishReason.STOP, Usage(3, 2))]


def test_max_tokens_ends_the_row() -> None:
    subject = scheduler()
    subject.submit(submit(1, max_tokens=2))
    step(subject)
    _, events = step(subject, r1=(5, 6, 8))
    assert events == [Tokens(1, (5, 6)), Generated(1, FinishReason.LENGTH, Usage(3, 2))]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_cancelled_request_ends_once_and_its_row_is_dropped_first(steps: int) -> None:
    subject = scheduler(budget=1)
    subject.submit(submit(1, length=3))
    for _ in range(steps):
        step(subject)
    assert subject.cancel(1) == [Generated(1, FinishReason.CANCELLED, Usage(3, 0))]
    assert subject.cancel(1) == []
    assert subject.plan().drop == ((1,) if steps else ())
    assert subject.idle


def test_output_of_a_cancelled_row_is_ignored() -> None:
    subject = scheduler()
    subject.submit(submit(1))
    step(subject)
    plan = subject.plan()
    subject.cancel(1)
    assert subject.advance(plan, StepResult((RowOutput(1, (5,)),))) == []


def test_no_chunk_is_planned_while_one_spans_steps() -> None:
    subject = scheduler(rows=3, budget=4)
    subject.submit(submit(1, length=1))
    step(subject)
    subject.submit(submit(2, length=50))
    subject.submit(submit(3, length=20))
    plan = subject.plan()
    assert [(chunk.start, chunk.end) for chunk in plan.prefill] == [(0, 4)]
    subject.advance(plan, StepResult((RowOutput(1, (5,)),), prefilling=True))
    plan = subject.plan()
    assert plan.decode == (1,) and plan.prefill == () and not subject.idle
    subject.advance(plan, StepResult((RowOutput(1, (5,)),)))
    plan = subject.plan()
    assert [(chunk.start, chunk.end) for chunk in plan.prefill] == [(4, 8)]
    subject.advance(plan, StepResult((RowOutput(1, (5,)),), prefilling=True))
    subject.cancel(1)
    assert [(chunk.start, chunk.end) for chunk in subject.plan().prefill] == [(8, 12)], "no row waits for it"


@pytest.mark.parametrize("alone", [False, True])
def test_a_row_joins_after_its_last_chunk_spans_steps(alone: bool) -> None:
    subject = scheduler(rows=3, budget=4)
    subject.submit(submit(1, length=1))
    step(subject)
    subject.submit(submit(2, length=5))
    plan = subject.plan()
    assert plan.prefill[0].joins
    subject.advance(plan, StepResult((RowOutput(1, (5,)),), prefilling=True))
    if alone:
        subject.cancel(1)
    plan = subject.plan()
    assert plan.decode == (() if alone else (1,)) and plan.prefill == () and not subject.idle
    subject.advance(plan, StepResult())
    assert subject.plan().decode == ((2,) if alone else (1, 2))


@pytest.mark.parametrize("ending", ["cancelled", "failed"])
def test_a_row_may_end_while_its_last_chunk_is_computed(ending: str) -> None:
    subject = scheduler(rows=3, budget=4)
    subject.submit(submit(1, length=1))
    step(subject)
    subject.submit(submit(2, length=5))
    plan = subject.plan()
    subject.advance(plan, StepResult((RowOutput(1, (5,)),), prefilling=True))
    assert subject.cancel(2) if ending == "cancelled" else subject.fail("broken")
    plan = subject.plan()
    assert plan.drop == ((2,) if ending == "cancelled" else ())
    subject.advance(plan, StepResult())
    assert 2 not in subject.plan().decode


def test_a_prefill_only_request_ends_with_its_last_chunk() -> None:
    subject = scheduler(rows=3, budget=4)
    subject.submit(submit(1, length=1))
    step(subject)
    subject.submit(submit(2, length=5, max_tokens=0))
    plan = subject.plan()
    assert subject.advance(plan, StepResult(prefilling=True)) == []
    assert [type(event) for event in subject.advance(subject.plan(), StepResult())] == [Generated]


def test_a_failed_step_fails_its_requests_and_no_others() -> None:
    subject = scheduler(rows=3, budget=4)
    subject.submit(submit(1, length=1))
    step(subject)
    subject.submit(submit(2, length=50))
    subject.submit(submit(3, length=30))
    plan = subject.plan()
    assert [chunk.request.request_id for chunk in plan.prefill] == [2]
    assert subject.fail("broken") == [Failed(1, "broken"), Failed(2, "broken")]
    plan, _ = step(subject)
    assert plan.drop == (), "the backend was reset: there is nothing to drop"
    assert [(chunk.request.request_id, chunk.start) for chunk in plan.prefill] == [(3, 0)]


def test_all_requests_fail_when_the_engine_stops() -> None:
    subject = scheduler(rows=1)
    subject.submit(submit(1))
    subject.submit(submit(2))
    step(subject)
    assert subject.fail_all("gone") == [Failed(1, "gone", gone=True), Failed(2, "gone", gone=True)]
    assert subject.plan().drop == (1,)


@pytest.mark.parametrize("start", State)
@pytest.mark.parametrize("end", State)
def test_only_moves_in_the_table_are_allowed(start: State, end: State) -> None:
    request = Request(submit(1))
    request.state = start
    if end in MOVES[start]:
        request.move(end)
        assert request.state is end
    else:
        with pytest.raises(IllegalMove, match=f"{start.name} to {end.name}"):
            request.move(end)


def test_a_duplicate_id_raises() -> None:
    subject = scheduler()
    subject.submit(submit(1))
    with pytest.raises(ValueError, match="submitted twice"):
        subject.submit(submit(1))


def test_a_failing_row_keeps_its_output_and_fails_alone() -> None:
    subject = scheduler()
    for number in (1, 2):
        subject.submit(submit(number, length=1))
    step(subject)
    plan = subject.plan()
    result = StepResult((RowOutput(1, (5,)), RowOutput(2, (6,))), failed=(RowFailure(1, "no"), RowFailure(7, "gone")))
    assert subject.advance(plan, result) == [Tokens(1, (5,)), Tokens(2, (6,)), Failed(1, "no")]
    assert step(subject)[0] == Plan(drop=(1,), decode=(2,))


def test_a_request_for_prompt_logprobs_only_ends_with_its_prompt() -> None:
    subject = scheduler(budget=4)
    subject.submit(Generate(1, tuple(range(7)), 0, prompt_logprobs=0))
    scores = [tuple(TokenLogprob(token, -1.0) for token in tokens) for tokens in ((1, 2, 3, 4), (5, 6))]
    events = []
    for part in scores:
        events += subject.advance(subject.plan(), StepResult(prompt_logprobs=(ChunkLogprobs(1, part),)))
    finished = Generated(1, FinishReason.LENGTH, Usage(7, 0))
    assert events == [PromptLogprobs(1, scores[0]), PromptLogprobs(1, scores[1]), finished]
    assert step(subject)[0] == Plan(drop=(1,))
    assert subject.idle


def test_a_prompt_does_not_reuse_what_the_same_plan_will_save() -> None:
    """The backend saves a checkpoint after its chunk has run: another prompt of this plan cannot start from it."""
    index = PrefixIndex(block=4, block_bytes=1, budget=100, from_checkpoints=True)
    subject = GenerationScheduler(
        max_rows=4, prefill_tokens=64, prefix_cache=CheckpointPrefixCache(index, lambda tokens: 1)
    )
    for number in (1, 2):
        subject.submit(Generate(number, tuple(range(9)), 5))
    plan = subject.plan()
    assert [chunk.start for chunk in plan.prefill] == [0, 0]
    assert plan.prefill[0].save is not None
    assert all(chunk.reuse == () and chunk.reuse_checkpoint is None for chunk in plan.prefill)


@pytest.mark.parametrize("ending", [None, "cancelled", "preempted"])
def test_beside_rows_a_long_prompt_is_saved_a_step_before_its_row_joins(ending: str | None) -> None:
    """Saving it and joining take the host longer than a step, each of them."""
    index = PrefixIndex(block=4, block_bytes=1, budget=100, least=2)
    subject = GenerationScheduler(max_rows=3, prefill_tokens=64, prefix_cache=BlockPrefixCache(index, share_tokens=4))
    subject.submit(submit(1, length=1))
    step(subject)
    for number, length in ((2, 6), (3, 17)):  # the first is too short to be saved
        subject.submit(Generate(number, tuple(range(10 * number, 10 * number + length)), 5))
    plan, _ = step(subject, r1=(5,))
    assert [chunk.request.request_id for chunk in plan.prefill] == [2, 3]
    plan, _ = step(subject, r1=(5,))
    assert plan.decode == (1, 2) and [(order.request_id, len(order.handles)) for order in plan.save] == [(3, 4)]
    if ending == "cancelled":
        subject.cancel(3)
    elif ending == "preempted":
        subject.preempt(3)
    plan, _ = step(subject, r1=(5,))
    if ending is None:
        assert plan.decode == (1, 2, 3) and not plan.save and [order.request_id for order in plan.share] == [3]
        return
    assert plan.drop == (3,) and plan.decode == (1, 2) and not plan.save
    if ending == "preempted":
        assert [(chunk.start, chunk.end) for chunk in plan.prefill] == [(16, 16)], "nothing is computed twice"


@pytest.mark.parametrize(("copying", "waits"), [(0, 1), (1, 2), (2, 3), (1000, SAVING_STEPS)])
@pytest.mark.parametrize("prefilling", [False, True])
def test_a_row_waits_for_what_is_saved_of_its_prompt_but_not_for_ever(
    copying: int, waits: int, prefilling: bool
) -> None:
    """`copying`: for how many steps the backend says so. Chunks of other prompts do not keep it waiting."""
    index = PrefixIndex(block=4, block_bytes=1, budget=100, least=2)
    subject = GenerationScheduler(max_rows=3, prefill_tokens=64, prefix_cache=BlockPrefixCache(index))
    subject.submit(submit(1, length=1, max_tokens=10_000))
    step(subject)
    subject.submit(submit(2, length=17))
    step(subject, r1=(5,))
    steps = 0
    while 2 not in (plan := subject.plan()).decode:
        assert bool(plan.save) is (steps == 0)
        subject.advance(plan, StepResult((RowOutput(1, (5,)),), saving=steps < copying, prefilling=prefilling))
        steps += 1
        assert steps < 10
    assert steps == waits


def test_alone_a_prompt_is_saved_in_the_step_in_which_it_joins() -> None:
    index = PrefixIndex(block=4, block_bytes=1, budget=100, least=2)
    subject = GenerationScheduler(max_rows=3, prefill_tokens=64, prefix_cache=BlockPrefixCache(index))
    subject.submit(submit(1, length=17))
    step(subject)
    plan, _ = step(subject)
    assert plan.decode == (1,) and len(plan.save) == 1
