"""Whatever becomes of drafts, the scheduler's books are right: tokens, usage, memory, prefix cache, preemption."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.engine.generation.kv_budget import MERGED_SHARE, MERGED_TOKENS, KvBudget, tokens_for_row
from millstream.engine.generation.messages import Generate, Generated, Tokens
from millstream.engine.generation.plan import Plan, RowOutput, StepResult
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.speculation.choice import Odds, Outcome
from millstream.engine.generation.speculation.depth import Choice, SpeculationDepth
from millstream.engine.generation.speculation.lengths import LENGTHS
from millstream.engine.messages import Event, expanded
from millstream.engine.prefix_cache.cache import NullPrefixCache
from millstream.engine.prefix_cache.prompt import CachedPrompt
from millstream.types import FinishReason, Grammar, Usage
from support.tiers import examples
from support.token_counting import CountingBackend, digest


class RandomDepth(SpeculationDepth):
    """Asks for drafts of any depth at any step."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(("known",))
        self._draw = draw

    def choose(self, rows: Mapping[int, Collection[str]], batch: int) -> Choice:
        assert all(drafters == ("known",) for drafters in rows.values())
        depth = self._draw.choice([0, *(length - 1 for length in LENGTHS[1:])]) if rows else 0
        return Choice(depth, Odds((), ()) if depth else None, tuple(rows))


class RecordingCache(NullPrefixCache):
    """Notes how many tokens each row that ended is said to have in its KV cache."""

    def __init__(self) -> None:
        self.computed: dict[int, int] = {}

    def ended(self, prompt: CachedPrompt, generated: Sequence[int], *, computed_last: bool = True) -> None:
        self.computed[prompt.request_id] = len(prompt.tokens) + len(generated) - (not computed_last)


def answer(submit: Generate) -> list[int]:
    """What a request gives, up to its stop token."""
    found: list[int] = []
    context = digest(submit.prompt)
    while len(found) < submit.max_tokens:
        if context in submit.stop_tokens and len(found) >= submit.min_tokens:
            return found
        found.append(context)
        context = digest([context], context)
    return found


@st.composite
def submits(draw: st.DrawFn) -> list[Generate]:
    """Some end by a stop token, some speculate never."""
    found = []
    for number in range(draw(st.integers(1, 8))):
        prompt = draw(st.sampled_from([1, 2, 200, 254, 255, 256, 700]))
        most = draw(st.sampled_from([1, 2, 3, 20, 60, 260]))
        whole = Generate(number, tuple(range(number, number + prompt)), most, speculate=draw(st.integers(0, 5)) > 0)
        if most > 3 and draw(st.booleans()):
            end = draw(st.integers(1, most - 1))
            stop = answer(whole)[end - 1]
            whole = Generate(
                number, whole.prompt, most, stop_tokens=frozenset({stop}), min_tokens=draw(st.sampled_from([0, 5]))
            )
        found.append(whole)
    return found


@settings(max_examples=examples(60), deadline=None)
@given(submits(), st.floats(1, 3), st.integers(0, 2**32), st.booleans())
def test_any_outcome_of_verification_leaves_the_books_right(
    wanted: list[Generate], scale: float, seed: int, preempt: bool
) -> None:
    draw = random.Random(seed)
    tokens = int(scale * tokens_for_row(max(len(each.prompt) + each.max_tokens for each in wanted)))
    usable = tokens - min(MERGED_TOKENS, int(MERGED_SHARE * tokens))
    cache, backend = RecordingCache(), CountingBackend(drafts=random.Random(seed + 1))
    subject = GenerationScheduler(
        max_rows=5,
        prefill_tokens=300,
        kv_budget=KvBudget(tokens),
        prefix_cache=cache,
        speculation=RandomDepth(draw),
    )
    left = list(wanted)
    given_tokens: dict[int, list[int]] = {each.request_id: [] for each in wanted}
    proposed: dict[int, int] = {each.request_id: 0 for each in wanted}
    ends: dict[int, Generated] = {}
    steps = 0
    while left or not subject.idle:
        if left and draw.random() < 0.3:
            subject.submit(left.pop(0))
        if preempt and backend.rows and draw.random() < 0.05:
            subject.preempt(draw.choice(list(backend.rows)))
        plan = subject.plan()
        check_drafts(plan, wanted, given_tokens)
        held = {request_id: row.length - 1 for request_id, row in backend.rows.items()}
        for request_id in plan.drop:
            computed = cache.computed.pop(request_id, None)
            if computed is not None and request_id in held:  # else it was never in the batch
                assert computed == held[request_id], "what a save may rely on"
        result = backend.step(plan)
        assert backend.peak <= usable
        running = set(subject._running)
        for row in result.rows:
            proposed[row.request_id] += row.proposed * (row.request_id in running)
        for event in expanded(subject.advance(plan, result)):
            record(event, given_tokens, ends)
        in_rows = sum(len(backend_row_tokens(subject, request_id)) for request_id in subject._running)
        assert subject.kv_tokens() == in_rows + sum(request.prefilled for request in subject._prefilling)
        steps += 1
        assert steps < 20_000, "some requests do not end"
    for submit in wanted:
        usage = ends[submit.request_id].usage
        assert given_tokens[submit.request_id] == answer(submit)
        stopped = len(answer(submit)) < submit.max_tokens
        assert ends[submit.request_id].reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert usage.completion_tokens == len(answer(submit)) + stopped
        assert usage.prompt_tokens == len(submit.prompt)
        assert usage.accepted_prediction_tokens + usage.rejected_prediction_tokens == proposed[submit.request_id]
        assert usage.accepted_prediction_tokens <= usage.completion_tokens
        assert submit.speculate or not proposed[submit.request_id]


def check_drafts(plan: Plan, wanted: list[Generate], given_tokens: dict[int, list[int]]) -> None:
    for request_id, most in plan.drafts:
        assert request_id in plan.decode and wanted[request_id].speculate
        assert 0 < most <= wanted[request_id].max_tokens - len(given_tokens[request_id]) - 1


def backend_row_tokens(subject: GenerationScheduler, request_id: int) -> list[int]:
    request = subject._running[request_id]
    return [*request.submit.prompt, *request.tokens]


def record(event: Event, given_tokens: dict[int, list[int]], ends: dict[int, Generated]) -> None:
    match event:
        case Tokens():
            assert event.request_id not in ends, "a token after the end"
            given_tokens[event.request_id].extend(event.tokens)
        case Generated():
            ends[event.request_id] = event
        case _:
            raise AssertionError(f"unexpected {event}")


def started(submit: Generate, speculation: SpeculationDepth | None = None) -> GenerationScheduler:
    subject = GenerationScheduler(max_rows=2, prefill_tokens=100, speculation=speculation)
    subject.submit(submit)
    plan = subject.plan()
    subject.advance(plan, StepResult())
    return subject


@pytest.mark.parametrize("tokens", [(5, 5, 9, 5, 5), (9, 5), (5, 9), (9,), (9, 5, 5, 5, 5)])
def test_a_stop_token_inside_an_accepted_draft_ends_the_row(tokens: tuple[int, ...]) -> None:
    """What comes after it was computed and is not given. The draft tokens after it count as rejected."""
    subject = started(Generate(1, (1, 2), 50, stop_tokens=frozenset({9})))
    accepted = len(tokens) - 1
    plan = subject.plan()
    events = subject.advance(plan, StepResult((RowOutput(1, tokens, (), 4, accepted, "known"),), length=5))
    before_stop = tokens.index(9)
    end = events[-1]
    assert isinstance(end, Generated) and end.reason is FinishReason.STOP
    right = min(accepted, before_stop + 1)
    assert end.usage == Usage(
        2, before_stop + 1, accepted_prediction_tokens=right, rejected_prediction_tokens=4 - right
    )
    assert len(events) == (2 if before_stop else 1)


def test_the_figures_of_an_engine_without_drafters_are_none() -> None:
    assert GenerationScheduler(max_rows=1, prefill_tokens=1).speculated() is None
    assert GenerationScheduler(max_rows=1, prefill_tokens=1, speculation=SpeculationDepth(("mtp",))).speculated()


def test_only_drafters_that_may_have_something_are_counted_on() -> None:
    subject = SpeculationDepth(("grammar", "prediction", "mtp", "prompt-lookup"))
    plain = Generate(1, (1,), 5)
    assert subject.drafters_of(plain) == ("mtp", "prompt-lookup")
    guided = Generate(2, (1,), 5, grammar=Grammar("regex", "a"), prediction=(1, 2))
    assert subject.drafters_of(guided) == ("grammar", "prediction", "mtp", "prompt-lookup")


def test_steps_with_other_work_say_nothing_about_costs() -> None:
    """Nor does the step after one, in which a chunk may still show."""

    class Noting(SpeculationDepth):
        def __init__(self) -> None:
            super().__init__(("known",))
            self.seconds: list[float | None] = []
            self.walls: list[tuple[float, float] | None] = []

        def observe(self, outcomes, **told) -> None:  # type: ignore[no-untyped-def]
            self.seconds.append(told["seconds"])
            self.walls.append(told["wall"])

    depth = Noting()
    subject = started(Generate(1, (1, 2), 50), depth)
    for step in range(6):
        if step == 3:
            subject.submit(Generate(2, (1, 2, 3), 1))
        plan = subject.plan()
        rows = tuple(RowOutput(request_id, (5,)) for request_id in plan.decode if step)
        subject.advance(plan, StepResult(rows), 0.25)
    # Prefill; join; first without rows; quiet; prefill of the second; join of the second; after it.
    assert depth.seconds == [None, None, None, 0.25, None, None, None]
    assert depth.walls == [None, None, None, (1.0, 0.25), None, None, None]


@pytest.mark.parametrize("waited", [False, True])
def test_a_plain_step_counts_though_drafts_were_planned_unless_it_waited_for_them(waited: bool) -> None:
    """Else the cost of a plain step would stay what it was when speculation began."""
    depth = SpeculationDepth(("known",))
    subject = started(Generate(1, (1, 2), 50), depth)
    for step in range(9):
        plan = subject.plan()
        rows = tuple(RowOutput(request_id, (5,)) for request_id in plan.decode if step)
        guessed = tuple(Outcome(each, "known", 1, 1) for each in plan.guess)
        subject.advance(plan, StepResult(rows, guessed=guessed, waited=waited and bool(plan.drafts)), 0.25)
    assert plan.drafts
    for _ in range(9):
        plan = subject.plan()
        rows = tuple(RowOutput(request_id, (5,)) for request_id in plan.decode)
        subject.advance(plan, StepResult(rows, waited=waited), 0.125)
    assert depth._costs.plain(1) == (0.25 if waited else 0.125)


def test_a_guess_and_a_draft_teach_the_same() -> None:
    by_guess, by_pass = SpeculationDepth(("known",)), SpeculationDepth(("known",))
    for _ in range(20):
        by_guess.observe([], guessed=[Outcome(1, "known", 1, 1)])
        by_pass.observe([Outcome(1, "known", 1, 1)], length=2)
    assert by_guess._acceptance(1, "known").rate == by_pass._acceptance(1, "known").rate > 0.9
    assert by_guess.speculated.passes == 0 and by_pass.speculated.passes == 20
