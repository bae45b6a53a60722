"""The scheduler of speech engines, by properties: every piece once and in order, every request ends, nobody waits for
ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.messages import Event, Failed
from millstream.engine.speech.messages import SpeakMore, SpeechEnded, Spoken
from millstream.engine.speech.plan import SpeechPlan
from millstream.engine.speech.scheduler import SpeechScheduler
from support.speeches import facts, piece, spoken, spoken_request


class Run:
    """Steps a scheduler and keeps its events. Batches take `steps` steps."""

    def __init__(self, scheduler: SpeechScheduler, steps: int = 1) -> None:
        self.scheduler = scheduler
        self.steps = steps
        self.left: dict[int, tuple[SpeechPlan, int]] = {}
        self.plans: list[SpeechPlan] = []
        self.events: list[Event] = []

    def step(self) -> None:
        plan = self.scheduler.plan()
        list(self.scheduler.started())
        self.plans.append(plan)
        if plan.begin:
            self.left[plan.batch] = (plan, self.steps)
        first, left = self.left[plan.batch]
        self.left[plan.batch] = (first, left - 1)
        result = spoken(first, done=left == 1)
        self.events += self.scheduler.advance(plan, result)

    def drain(self, most: int = 1000) -> None:
        for _ in range(most):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("it does not end")

    def pieces(self, request_id: int) -> list[int]:
        done = [event for event in self.events if isinstance(event, Spoken) and event.last]
        return [event.piece for event in done if event.request_id == request_id]

    def ends(self) -> list[int]:
        return [event.request_id for event in self.events if isinstance(event, SpeechEnded)]


@given(
    requests=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=6),
    batch_pieces=st.integers(1, 4),
    open_batches=st.integers(1, 3),
    steps=st.integers(1, 3),
)
def test_every_piece_is_spoken_once_and_in_order(
    requests: list[list[int]], batch_pieces: int, open_batches: int, steps: int
) -> None:
    run = Run(SpeechScheduler(facts(batch_pieces, open_batches)), steps)
    for number, lengths in enumerate(requests):
        run.scheduler.submit(spoken_request(number, [[1] * length for length in lengths]))
    run.drain()
    for number, lengths in enumerate(requests):
        assert run.pieces(number) == list(range(len(lengths)))
    assert sorted(run.ends()) == list(range(len(requests)))
    assert all(len(plan.begin) <= batch_pieces for plan in run.plans)
    begun = [[each.request_id for each in plan.begin] for plan in run.plans]
    assert all(len(set(batch)) == len(batch) for batch in begun), "two pieces of one request in one batch"


def test_a_short_text_does_not_wait_for_a_long_one() -> None:
    run = Run(SpeechScheduler(facts()))
    run.scheduler.submit(spoken_request(1, [[1, 2]] * 10))
    run.step()
    run.scheduler.submit(spoken_request(2, [[1, 2]]))
    run.drain()
    assert run.ends() == [2, 1]
    order = [plan.begin[0].request_id for plan in run.plans]
    assert order.index(2) <= 2


def test_pieces_of_unlike_length_are_not_padded_to_each_other() -> None:
    run = Run(SpeechScheduler(facts(batch_pieces=4)))
    for number, length in enumerate((10, 9, 40, 8)):
        run.scheduler.submit(spoken_request(number, [[1] * length]))
    run.drain()
    assert [sorted(each.request_id for each in plan.begin) for plan in run.plans] == [[0, 1, 3], [2]]


def test_pieces_may_follow_and_an_empty_end_ends_the_request() -> None:
    run = Run(SpeechScheduler(facts()))
    run.scheduler.submit(spoken_request(1, [[1]], more=True))
    run.drain()
    assert run.pieces(1) == [0] and run.ends() == [] and run.scheduler.idle
    run.events += run.scheduler.handle(SpeakMore(1, (piece([2]), piece([3])), more=True))
    run.drain()
    assert run.pieces(1) == [0, 1, 2] and run.ends() == []
    run.events += run.scheduler.handle(SpeakMore(1, ()))
    assert run.ends() == [1]
    assert run.scheduler.handle(SpeakMore(1, (piece([2]),))) == []


def test_a_cancelled_batch_is_dropped_by_the_next_plan() -> None:
    scheduler = SpeechScheduler(facts(open_batches=2))
    run = Run(scheduler, steps=5)
    scheduler.submit(spoken_request(1, [[1]]))
    run.step()
    assert scheduler.cancel(1) == [SpeechEnded(1)]
    assert not scheduler.idle, "the backend must be told"
    plan = scheduler.plan()
    assert plan.dropped == (1,) and not plan.begin
    assert scheduler.idle
    assert scheduler.cancel(1) == []


def test_a_batch_goes_on_for_those_who_still_want_it() -> None:
    scheduler = SpeechScheduler(facts(batch_pieces=2))
    run = Run(scheduler, steps=2)
    scheduler.submit(spoken_request(1, [[1]]))
    scheduler.submit(spoken_request(2, [[1]]))
    run.step()
    run.events += scheduler.cancel(1)
    run.drain()
    assert run.ends() == [1, 2] and run.pieces(2) == [0] and run.pieces(1) == []


def test_a_failed_step_fails_what_the_backend_held() -> None:
    scheduler = SpeechScheduler(facts())
    for number in (1, 2):
        scheduler.submit(spoken_request(number, [[1]]))
    scheduler.plan()
    assert scheduler.fail("broken") == [Failed(1, "broken")]
    run = Run(scheduler)
    run.drain()
    assert run.ends() == [2]
