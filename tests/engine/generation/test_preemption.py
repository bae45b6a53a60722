"""Preemption: rows that outgrow the budget yield to older ones, and no client can tell."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.engine.generation.kv_budget import MERGED_SHARE, MERGED_TOKENS, KvBudget, tokens_for_row
from millstream.engine.generation.messages import Generate, Generated, PromptLogprobs, Tokens
from millstream.engine.generation.plan import ChunkLogprobs, Plan, RowOutput, StepResult
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.messages import Event, expanded
from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.index import PrefixIndex
from millstream.types import FinishReason, Media, TokenLogprob, Usage
from support.tiers import examples
from support.token_counting import CountingBackend, digest

PREFILL_TOKENS = 400


@dataclass(frozen=True)
class Arrival:
    step: int
    submit: Generate


@dataclass
class Seen:
    """What the clients of a run saw."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Generated] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        match event:
            case Tokens():
                assert event.request_id not in self.ends
                self.tokens.setdefault(event.request_id, []).extend(event.tokens)
            case PromptLogprobs():
                assert event.request_id not in self.tokens, "after the first token"
                scores = self.prompt_logprobs.setdefault(event.request_id, [])
                scores.extend(score.token for score in event.logprobs)
            case Generated():
                assert event.request_id not in self.ends, "ended twice"
                self.ends[event.request_id] = event
            case _:
                raise AssertionError(f"unexpected {event}")


def check_order(plan: Plan, before: set[int], ended: set[int], waiting: set[int]) -> int:
    """The oldest row stays, and only short prompts overtake: ids are in the order of arrival. Returns how many were
    preempted."""
    preempted = set(plan.drop) - ended
    assert not preempted or preempted.isdisjoint({min(before)}), "the oldest was preempted"
    first = {chunk.request.request_id: len(chunk.request.prompt) for chunk in plan.prefill if not chunk.start}
    started = set(first) - before
    for request_id in started:
        overtaken = any(other < request_id for other in waiting - started)
        assert not overtaken or first[request_id] <= PREFILL_TOKENS + 1, "a younger, long request started first"
    return len(preempted)


def run(
    arrivals: list[Arrival], budget: KvBudget, usable: int | None, *, rows: int = 6, force: random.Random | None = None
) -> tuple[Seen, int]:
    """Returns what clients saw, and how many preemptions there were. `usable`: tokens that no step may exceed."""
    subject = GenerationScheduler(max_rows=rows, prefill_tokens=PREFILL_TOKENS, kv_budget=budget)
    backend = CountingBackend(force)
    seen, preemptions, step = Seen(), 0, 0
    left = sorted(arrivals, key=lambda each: each.submit.request_id)
    while left or not subject.idle:
        while left and left[0].step <= step:
            subject.submit(left.pop(0).submit)
        ended = set(seen.ends)
        if force is not None and backend.rows and force.random() < 0.05:
            subject.preempt(force.choice(list(backend.rows)))
            plan = subject.plan()
        else:
            before = (set(backend.rows) | set(backend.prompts)) - ended
            submitted = {each.submit.request_id for each in arrivals} - {each.submit.request_id for each in left}
            plan = subject.plan()
            preemptions += check_order(plan, before, ended, submitted - ended - before)
        result = backend.step(plan)
        assert usable is None or backend.peak <= usable, f"step {step}"
        for event in expanded(subject.advance(plan, result)):
            seen.add(event)
        step += 1
        assert step < 20_000, "some requests do not end"
    return seen, preemptions


def expected(arrivals: list[Arrival]) -> Seen:
    seen = Seen()
    for submit in (each.submit for each in arrivals):
        count, context = len(submit.prompt), digest(submit.prompt)
        for _ in range(submit.max_tokens):
            seen.tokens.setdefault(submit.request_id, []).append(context)
            context = digest([context], context)
        if submit.prompt_logprobs is not None and count > 1:
            seen.prompt_logprobs[submit.request_id] = list(submit.prompt[1:])
        usage = Usage(count, submit.max_tokens)
        seen.ends[submit.request_id] = Generated(submit.request_id, FinishReason.LENGTH, usage)
    return seen


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Requests of up to 1,500 tokens, most of them short."""
    count, steps = draw(st.integers(2, 10)), 0
    found = []
    for number in range(count):
        steps += draw(st.sampled_from([0, 0, 1, 7, 150]))
        prompt = draw(st.sampled_from([1, 2, 200, 254, 255, 256, 257, 500, 1200]))
        output = draw(st.sampled_from([1, 2, 40, 260]))
        top = draw(st.sampled_from([None, None, 0]))
        tokens = tuple(range(number, number + prompt))
        found.append(Arrival(steps, Generate(number, tokens, output, prompt_logprobs=top)))
    return found


@settings(max_examples=examples(60), deadline=None)
@given(arrivals(), st.floats(1, 3), st.integers(0, 2**32))
def test_no_step_exceeds_the_budget_and_every_request_ends(wanted: list[Arrival], scale: float, seed: int) -> None:
    """From a budget for the longest request alone to one for several."""
    longest = max(len(each.submit.prompt) + each.submit.max_tokens for each in wanted)
    tokens = int(scale * tokens_for_row(longest))
    usable = tokens - min(MERGED_TOKENS, int(MERGED_SHARE * tokens))
    assert run(wanted, KvBudget(tokens), usable)[0] == expected(wanted)
    assert run(wanted, KvBudget(tokens), usable, force=random.Random(seed))[0] == expected(wanted)


@settings(max_examples=examples(40), deadline=None)
@given(arrivals(), st.integers(0, 60_000))
def test_slots_stay_vacant_only_where_they_fit(wanted: list[Arrival], more: int) -> None:
    """Around the budget from which on there is plenty."""
    tokens = tokens_for_row(1500) + more
    usable = tokens - min(MERGED_TOKENS, int(MERGED_SHARE * tokens))
    assert run(wanted, KvBudget(tokens), usable)[0] == expected(wanted)


def test_memory_is_tight_as_long_as_a_large_request_is_there() -> None:
    subject = GenerationScheduler(max_rows=6, prefill_tokens=PREFILL_TOKENS, kv_budget=KvBudget(60_000))
    backend = CountingBackend()
    subject.submit(Generate(1, (1, 2, 3), 240))
    seen = []
    for number in range(160):
        if number == 10:
            subject.submit(Generate(2, tuple(range(9000)), 2))
        plan = subject.plan()
        subject.advance(plan, backend.step(plan))
        seen.append((plan.tight, any(chunk.request.request_id == 2 for chunk in plan.prefill)))
    assert not any(tight for tight, _ in seen[:10])
    assert all(tight for tight, reads in seen if reads), "it was admitted beside what is vacant"
    assert not subject.plan().tight, "it has ended, and what was sure for some steps is looked at again"


@settings(max_examples=examples(20), deadline=None)
@given(arrivals(), st.integers(0, 2**32))
def test_preemption_at_any_step_changes_nothing_that_a_client_sees(wanted: list[Arrival], seed: int) -> None:
    assert run(wanted, KvBudget(None), None, force=random.Random(seed))[0] == expected(wanted)


def test_rows_that_grow_are_preempted_and_start_again() -> None:
    """Not only by chance: here all rows start together and cannot stay together."""
    wanted = [Arrival(0, Generate(number, tuple(range(180)), 500)) for number in range(6)]
    seen, preemptions = run(wanted, KvBudget(5000), None)
    assert preemptions > 0
    assert seen == expected(wanted)


def test_a_big_request_is_not_overtaken_forever() -> None:
    """Short ones keep coming; the big one starts when those before it have ended."""
    short = [Arrival(0 if number < 3 else 2 * number, Generate(number, (1, 2), 200)) for number in range(40)]
    big = Arrival(6, Generate(3, tuple(range(1000)), 300))
    wanted = [*short[:3], big, *short[4:]]
    seen, _ = run(wanted, KvBudget(tokens_for_row(1300)), None)
    assert list(seen.ends).index(3) <= 5, "only those that ran before it, or fit beside it, end before it"


def submit_to(subject: GenerationScheduler, submit: Generate, steps: int) -> list[Event]:
    """Run a request alone. A row reports the number of the step as its token."""
    subject.submit(submit)
    return advance(subject, steps)


def advance(subject: GenerationScheduler, steps: int) -> list[Event]:
    events: list[Event] = []
    for _ in range(steps):
        plan = subject.plan()
        events += expanded(subject.advance(plan, StepResult(tuple(RowOutput(number, (7,)) for number in plan.decode))))
    return events


def test_a_preempted_request_goes_on_with_its_output_as_prompt() -> None:
    subject = GenerationScheduler(max_rows=2, prefill_tokens=100)
    submit_to(subject, Generate(1, (5, 6), 9), 4)
    subject.preempt(1)
    plan = subject.plan()
    assert plan.drop == (1,) and plan.decode == ()
    [chunk] = plan.prefill
    assert (chunk.request.prompt, chunk.request.resumed, chunk.request.output) == ((5, 6, 7, 7, 7), 3, (7, 7, 7))
    subject.advance(plan, StepResult())
    subject.preempt(1)
    assert subject.plan().prefill[0].request.prompt == (5, 6, 7, 7, 7), "it has generated nothing since"


def test_a_preempted_request_can_be_cancelled_and_has_its_usage() -> None:
    subject = GenerationScheduler(max_rows=1, prefill_tokens=100)
    submit_to(subject, Generate(1, (5, 6), 9), 4)
    subject.submit(Generate(2, (5,), 9))
    subject.preempt(1)
    assert subject.cancel(1) == [Generated(1, FinishReason.CANCELLED, Usage(2, 3))]
    plan = subject.plan()
    assert plan.drop == (1,) and [chunk.request.request_id for chunk in plan.prefill] == [2]


def test_a_failed_step_does_not_fail_who_was_preempted() -> None:
    subject = GenerationScheduler(max_rows=2, prefill_tokens=100)
    submit_to(subject, Generate(1, (5, 6), 9), 2)
    submit_to(subject, Generate(2, (5, 6), 9), 2)
    subject.preempt(2)
    assert [event.request_id for event in subject.fail("broken") if not isinstance(event, Tokens)] == [1]  # type: ignore[attr-defined]
    assert [chunk.request.request_id for chunk in subject.plan().prefill] == [2]


def test_what_a_preempted_row_computed_is_cached() -> None:
    cache = BlockPrefixCache(PrefixIndex(block=4, block_bytes=1, budget=100))
    subject = GenerationScheduler(max_rows=2, prefill_tokens=100, prefix_cache=cache)
    submit_to(subject, Generate(0, tuple(range(8)), 1), 3)  # ends: its prompt is cached
    submit_to(subject, Generate(1, tuple(range(10)), 20), 8)
    subject.submit(Generate(2, (1,), 20))
    advance(subject, 1)
    subject.preempt(1)
    subject.preempt(2)
    plan = subject.plan()
    assert [order.tokens for order in plan.save if order.request_id == 1] == [10 + 7], "all but its last token"
    subject.advance(plan, StepResult())
    subject.preempt(1)
    chunk = next(chunk for chunk in subject.plan().prefill if chunk.request.request_id == 1)
    assert chunk.start == 16 and len(chunk.reuse) == 4
    [end] = subject.cancel(1)
    assert isinstance(end, Generated) and end.usage == Usage(10, 8, 8), "as of its first start"


def test_media_of_a_preempted_request_are_encoded_again() -> None:
    media = (Media("image", 1, 2, "digest", ()),)
    subject = GenerationScheduler(max_rows=2, prefill_tokens=100)
    subject.submit(Generate(1, (5, 6, 6, 7), 9, media=media))
    for preempted in (False, True):
        if preempted:
            subject.preempt(1)
        plan = subject.plan()
        assert [(chunk.start, chunk.end) for chunk in plan.prefill] == [(0, 1)]
        assert [order.first for order in plan.encode] == [0]
        subject.advance(plan, StepResult(encoded=((1, 1),)))
        plan = subject.plan()
        assert [(chunk.start, chunk.end) for chunk in plan.prefill] == [(1, 3)]
        subject.advance(plan, StepResult())


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_prompt_logprobs_are_sent_once(chunks: int) -> None:
    subject = GenerationScheduler(max_rows=1, prefill_tokens=2)
    subject.submit(Generate(1, (1, 2, 3, 4, 5), 2, prompt_logprobs=0))
    backend, seen = CountingBackend(), Seen()
    for step in range(12):
        if step == chunks:
            subject.preempt(1)
        plan = subject.plan()
        for event in expanded(subject.advance(plan, backend.step(plan))):
            seen.add(event)
    assert seen.prompt_logprobs == {1: [2, 3, 4, 5]}
    assert len(seen.tokens[1]) == 2 and seen.ends[1].usage == Usage(5, 2)


def test_a_score_is_more_than_its_token() -> None:
    """What is left out are positions, not tokens that were seen."""
    subject = GenerationScheduler(max_rows=1, prefill_tokens=100)
    subject.submit(Generate(1, (3, 3, 3), 1, prompt_logprobs=0))
    scores = tuple(TokenLogprob(3, value) for value in (-1.0, -2.0))
    plan = subject.plan()
    [event] = subject.advance(plan, StepResult(prompt_logprobs=(ChunkLogprobs(1, scores),)))
    assert event == PromptLogprobs(1, scores)
