"""The scheduler of encoder engines: every input is computed once, every request ends, and nobody waits for long."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millstream.engine.jobs.messages import Encoded, Vectors
from millstream.engine.jobs.plan import BatchPlan
from millstream.engine.jobs.scheduler import JobScheduler
from millstream.engine.messages import Event, Failed
from support.encodes import computed, encode, facts


def step(scheduler: JobScheduler) -> tuple[BatchPlan, list[Event]]:
    plan = scheduler.plan()
    return plan, list(scheduler.advance(plan, computed(plan)))


def drain(scheduler: JobScheduler) -> list[list[Event]]:
    """The events of each step until nothing is left."""
    steps = []
    while not scheduler.idle:
        steps.append(step(scheduler)[1])
    return steps


def vectors_of(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Whose vectors these are, by what they say and by what the event says."""
    found: list[tuple[int, int]] = []
    for event in events:
        if isinstance(event, Vectors):
            rows = np.frombuffer(event.values, np.float32).reshape(-1, event.width)
            assert [(event.request_id, index) for index in event.inputs] == [tuple(map(int, row)) for row in rows]
            found += [(event.request_id, index) for index in event.inputs]
    return found


def test_a_request_of_like_inputs_is_one_batch() -> None:
    scheduler = JobScheduler(facts())
    scheduler.submit(encode(1, [8, 8, 7]))
    plan, events = step(scheduler)
    assert plan.length == 8 and len(plan.inputs) == 3
    assert sorted(vectors_of(events)) == [(1, 0), (1, 1), (1, 2)]
    assert events[-1] == Encoded(1)
    assert scheduler.idle


def test_parts_of_pairs_travel_with_their_input() -> None:
    scheduler = JobScheduler(facts())
    scheduler.submit(encode(1, [3, 9], first_parts=[2, 4]))
    scheduler.submit(encode(2, [9]))
    parts = {}
    while not scheduler.idle:
        plan, _ = step(scheduler)
        parts |= {(each.request_id, each.index): each.first_part for each in plan.inputs}
    assert parts == {(1, 0): 2, (1, 1): 4, (2, 0): None}


def test_a_short_request_does_not_wait_for_a_huge_one() -> None:
    scheduler = JobScheduler(facts(batch_tokens=100))
    scheduler.submit(encode(1, [10] * 1000))
    step(scheduler)
    scheduler.submit(encode(2, [90]))
    seen: list[int] = []
    for _ in range(2):
        seen += [each.request_id for each in step(scheduler)[0].inputs]
    assert 2 in seen


def test_the_oldest_request_begins_every_other_batch() -> None:
    """However many short requests come: here one more in each step, of a length with which the oldest cannot share."""
    scheduler = JobScheduler(facts(batch_tokens=100))
    scheduler.submit(encode(0, [100] * 20))
    steps = 0
    while not any(Encoded(0) == event for event in step(scheduler)[1]):
        steps += 1
        scheduler.submit(encode(steps, [1]))
        assert steps < 40
    assert steps >= 20, "others got in between"


@given(
    st.lists(st.lists(st.integers(1, 120), min_size=1, max_size=30), min_size=1, max_size=6),
    st.integers(1, 500),
    st.integers(0, 100),
)
def test_every_input_is_computed_exactly_once_and_every_request_ends(
    requests: list[list[int]], batch_tokens: int, free_tokens: int
) -> None:
    scheduler = JobScheduler(facts(batch_tokens, free_tokens))
    for number, lengths in enumerate(requests):
        scheduler.submit(encode(number, lengths))
    steps = drain(scheduler)
    events = [event for each in steps for event in each]
    assert sorted(vectors_of(events)) == [(n, i) for n, lengths in enumerate(requests) for i in range(len(lengths))]
    ends = [event.request_id for event in events if isinstance(event, Encoded)]
    assert sorted(ends) == list(range(len(requests)))
    for number in range(len(requests)):
        mine = [event for event in events if event.request_id == number]  # type: ignore[attr-defined]
        assert isinstance(mine[-1], Encoded), "nothing comes after the end"
    assert len(steps) <= sum(map(len, requests))


class Machine(RuleBasedStateMachine):
    """Requests come, are held, refused, cancelled and fail in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = JobScheduler(facts(batch_tokens=60, free_tokens=5))
        self.count = 0
        self.held: set[int] = set()
        self.active: dict[int, set[int]] = {}
        """Inputs that have no vector yet."""
        self.arrivals: list[int] = []
        self.skipped = 0
        """Batches in a row without the oldest request."""

    def _new(self, lengths: list[int], *, held: bool) -> None:
        self.count += 1
        self.scheduler.submit(encode(self.count, lengths), held=held)
        self.active[self.count] = set(range(len(lengths)))
        if held:
            self.held.add(self.count)
        else:
            self.arrivals.append(self.count)

    def _end(self, request_id: int) -> None:
        del self.active[request_id]
        self.held.discard(request_id)
        if self.arrivals[:1] == [request_id]:
            self.skipped = 0
        if request_id in self.arrivals:
            self.arrivals.remove(request_id)

    @rule(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12), held=st.booleans())
    def submit(self, lengths: list[int], held: bool) -> None:
        self._new(lengths, held=held)

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def release(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        self.scheduler.release(request_id)
        self.held.remove(request_id)
        self.arrivals.append(request_id)

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def refuse(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        assert list(self.scheduler.refuse(request_id, "no", refused=True)) == [Failed(request_id, "no", refused=True)]
        self._end(request_id)

    @rule(data=st.data())
    @precondition(lambda self: self.active)
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.active)))
        assert list(self.scheduler.cancel(request_id)) == [Encoded(request_id)]
        assert list(self.scheduler.cancel(request_id)) == [], "it has ended"
        self._end(request_id)

    @rule()
    @precondition(lambda self: self.arrivals)
    def run(self) -> None:
        oldest = self.arrivals[0]
        plan, events = step(self.scheduler)
        self.skipped = 0 if any(each.request_id == oldest for each in plan.inputs) else self.skipped + 1
        assert self.skipped <= 1
        for request_id, index in vectors_of(events):
            self.active[request_id].remove(index)
        for event in events:
            if isinstance(event, Encoded):
                assert not self.active[event.request_id]
                self._end(event.request_id)

    @rule()
    @precondition(lambda self: self.arrivals)
    def fail(self) -> None:
        plan = self.scheduler.plan()
        events = list(self.scheduler.fail("broken"))
        running = {each.request_id for each in plan.inputs}
        assert {event.request_id for event in events if isinstance(event, Failed)} == running
        for request_id in running:
            self._end(request_id)
        self.skipped = 0  # nobody has got anything

    @invariant()
    def idle_means_that_nothing_is_left(self) -> None:
        assert self.scheduler.idle == (not self.arrivals)

    def teardown(self) -> None:
        left = list(self.scheduler.fail_all("the end"))
        assert sorted(event.request_id for event in left if isinstance(event, Failed) and event.gone) == sorted(
            self.active
        )
        super().teardown()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, stateful_step_count=30)


def test_a_request_that_is_cancelled_within_a_step_gets_no_vectors() -> None:
    scheduler = JobScheduler(facts())
    scheduler.submit(encode(1, [4]))
    scheduler.submit(encode(2, [4]))
    plan = scheduler.plan()
    assert list(scheduler.cancel(1)) == [Encoded(1)]
    events = list(scheduler.advance(plan, computed(plan)))
    assert vectors_of(events) == [(2, 0)]


def test_what_was_not_in_the_failed_step_goes_on() -> None:
    scheduler = JobScheduler(facts(batch_tokens=10))
    scheduler.submit(encode(1, [10]))
    scheduler.submit(encode(2, [10]))
    scheduler.plan()
    assert list(scheduler.fail("broken")) == [Failed(1, "broken")]
    assert [event for each in drain(scheduler) for event in each][-1] == Encoded(2)


def test_a_plan_that_is_logged_shows_no_text() -> None:
    scheduler = JobScheduler(facts())
    scheduler.submit(encode(1, [4], token=7))
    assert "\\x07" not in repr(scheduler.plan())
