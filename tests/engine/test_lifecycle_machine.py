"""Every accepted request ends in exactly one Finished or Failed, whatever the order of submit, cancel, step, fail
and shutdown. Run over the scheduler, step by step, and over a live owner thread with the same fake backend."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.messages import Generate, Tokens
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Cancel, Event, Failed, Finished, Shutdown, expanded
from millstream.errors import EngineGone
from support.engines import Driver
from support.fake import FakeBackend, Gate, answer
from support.tiers import examples

ROWS = 3
STOP = 40

PROMPTS = st.lists(st.integers(0, 96), min_size=1, max_size=12).map(tuple)


class Record:
    """Records the accepted requests and their events."""

    def __init__(self) -> None:
        self.accepted: dict[int, Generate] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Finished | Failed] = {}
        self.cancelled: set[int] = set()

    def add(self, events: list[Event]) -> None:
        for event in expanded(events):
            match event:
                case Tokens():
                    assert event.request_id not in self.ended, "tokens after the end"
                    self.tokens.setdefault(event.request_id, []).extend(event.tokens)
                case Finished() | Failed():
                    assert event.request_id in self.accepted
                    assert event.request_id not in self.ended, "ended twice"
                    self.ended[event.request_id] = event

    def check_answers(self) -> None:
        """The output of a request is a prefix of its expected answer, and all of it if it finished."""
        for request_id, submit in self.accepted.items():
            output = self.tokens.get(request_id, [])
            expected = answer(submit, submit.max_tokens)
            cut = next(
                (position for position, token in enumerate(expected) if token in submit.stop_tokens), len(expected)
            )
            assert output == expected[: len(output)]
            end = self.ended.get(request_id)
            if isinstance(end, Finished) and end.reason != "cancelled":
                assert output == expected[:cut]


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler and a fake backend on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self.scheduler = GenerationScheduler(max_rows=ROWS, prefill_tokens=6, chunk_sizer=ChunkSizer(most=3, least=3))
        self.backend = FakeBackend(max_rows=ROWS)
        self.next_id = 0
        self.down = False

    @precondition(lambda self: not self.down)
    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 6))
    def submit(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        submit = Generate(self.next_id, prompt, max_tokens, stop_tokens=frozenset({STOP}))
        self.next_id += 1
        self.scheduler.submit(submit)
        self.record.accepted[submit.request_id] = submit

    @rule(request_id=st.integers(0, 30))
    def cancel(self, request_id: int) -> None:
        alive = request_id in self.record.accepted and request_id not in self.record.ended
        events = self.scheduler.cancel(request_id)
        assert len(events) == (1 if alive else 0)
        self.record.add(events)

    @precondition(lambda self: not self.scheduler.idle)
    @rule(fails=st.integers(0, 7).map(lambda number: number == 0))
    def step(self, fails: bool) -> None:
        plan = self.scheduler.plan()
        if fails:  # the result of the step does not matter
            self.record.add(self.scheduler.fail("broken"))
            self.backend.reset()
        else:
            self.record.add(self.scheduler.advance(plan, self.backend.step(plan)))

    @precondition(lambda self: not self.down and self.next_id > 5)
    @rule()
    def shutdown(self) -> None:
        self.down = True
        self.record.add(self.scheduler.fail_all("stopping"))
        assert set(self.record.ended) == set(self.record.accepted)

    @invariant()
    def answers_are_correct(self) -> None:
        self.record.check_answers()

    def teardown(self) -> None:
        for _ in range(10000):
            if self.scheduler.idle:
                break
            self.step(False)
        assert set(self.record.ended) == set(self.record.accepted)
        assert not self.backend.rows and not self.backend.progress, "rows were left in the batch"
        self.record.check_answers()


class OwnerMachine(RuleBasedStateMachine):
    """A live engine whose backend is held in every step until the machine releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self.gate = Gate()
        self.backends: list[FakeBackend] = []
        link = ThreadLink(
            "machine", self._make, lambda facts: GenerationScheduler(max_rows=facts.max_rows, prefill_tokens=4)
        )
        self.driver = Driver(link)
        self.driver.start()
        self.next_id = 0
        self.down = False

    def _make(self) -> FakeBackend:
        self.backends.append(FakeBackend(max_rows=ROWS, gate=self.gate))
        return self.backends[0]

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 6))
    def submit(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        submit = Generate(self.next_id, prompt, max_tokens, stop_tokens=frozenset({STOP}))
        self.next_id += 1
        try:
            self.driver.post(submit)
        except EngineGone:
            assert self.down, "only an engine that was shut down may refuse"
            return
        self.record.accepted[submit.request_id] = submit

    @rule(request_id=st.integers(0, 30))
    def cancel(self, request_id: int) -> None:
        try:
            self.driver.post(Cancel(request_id))
        except EngineGone:
            assert self.down

    @rule()
    def release_a_step(self) -> None:
        self.gate.let_one()

    @rule()
    def fail_a_step(self) -> None:
        self.backends[0].fail_next = ValueError("broken")

    @precondition(lambda self: not self.down and self.next_id > 3)
    @rule()
    def shutdown(self) -> None:
        self.down = True
        self.driver.post(Shutdown())

    def teardown(self) -> None:
        self.gate.open()
        if not self.down:
            self.driver.wait_ended(*self.record.accepted)
        self.driver.stop()
        ended = {request_id: ends[0] for request_id, ends in self.driver.ends.items()}
        assert set(ended) == set(self.record.accepted)
        self.record.tokens, self.record.ended = self.driver.tokens, ended
        self.record.check_answers()
        assert self.backends[0].closed
        assert len(self.backends[0].threads) == 1


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=examples(200), stateful_step_count=60, deadline=None)
TestOwner = OwnerMachine.TestCase
TestOwner.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
