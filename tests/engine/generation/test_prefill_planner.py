"""The prefill planner in simulated time: order, pace, gaps and overtaking, over a device with a simple cost model."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.engine.generation.chunk_sizer import MOST_GAPS, SHARE, STRETCH, WAIT_SHARE, ChunkSizer
from millstream.engine.generation.messages import Generate, Tokens
from millstream.engine.generation.plan import Plan, RowOutput, StepResult
from millstream.engine.generation.prefill_planner import PATIENCE
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.messages import expanded
from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.checkpoints import CheckpointPrefixCache
from millstream.engine.prefix_cache.index import PrefixIndex
from millstream.model_facts import Calibration, GenerationFacts
from support.tiers import examples

GAP = 0.05


@dataclass
class Device:
    """What steps cost, in seconds. Beside rows a chunk is built in one step and computed in `parts` more; short prompts
    share a pass."""

    step: float = 0.0018
    row: float = 0.00002
    build: float = 0.003
    token: float = 0.0000125
    parts: int = 4
    depth: float = 0.0
    pending: list[float] = field(default_factory=list)

    def run(self, plan: Plan) -> tuple[StepResult, float]:
        tokens = sum(
            (chunk.end - chunk.start) * (1 + self.depth * (chunk.start + chunk.end) / 2) for chunk in plan.prefill
        )
        seconds = self.step + self.row * len(plan.decode) if plan.decode else 0.0
        assert not (plan.decode and plan.prefill and self.pending), "a chunk was planned while another one spans steps"
        if self.pending and plan.decode and not plan.complete_prefill:
            seconds += self.pending.pop(0)
        elif self.pending:
            seconds += sum(self.pending)
            self.pending.clear()
        if plan.prefill:
            seconds += self.build * (1 if plan.complete_prefill else len(plan.prefill))
            if plan.decode and not plan.complete_prefill and self.parts > 1:
                self.pending = [tokens * self.token / self.parts] * self.parts
            else:
                seconds += tokens * self.token
        rows = tuple(RowOutput(request_id, (1,)) for request_id in plan.decode)
        return StepResult(rows, prefilling=bool(self.pending and plan.decode)), seconds


MEASURED = Calibration(
    chunks=tuple((2**n, Device.build + 2**n * Device.token) for n in range(4, 13)),
    steps=((1, Device.step + Device.row),),
    save_seconds=0.00038,
    save_seconds_per_byte=2e-12,
    passes=tuple((2**n, Device.build + 2**n * Device.token) for n in range(6, 13)),
)

H200 = GenerationFacts(
    2**20, 2048, 32, 2**31, "none", "gpu (simulated)", kv_bytes_per_token=2**15, calibration=MEASURED
)


class Simulation:
    """Runs a scheduler over a device; `clock` is simulated."""

    def __init__(self, scheduler: GenerationScheduler, device: Device) -> None:
        self.scheduler = scheduler
        self.device = device
        self.clock = 0.0
        self.arrived: dict[int, float] = {}
        self.answered: dict[int, float] = {}
        """Per request, when its first token came, in this order."""
        self.gaps: list[float] = []
        self.late = 0
        self.plans: list[Plan] = []
        self.read: list[tuple[int, int]] = []
        """(request, tokens) of all chunks."""

    def submit(self, *lengths: int, max_tokens: int = 100_000) -> list[int]:
        first = len(self.arrived)
        ids = list(range(first, first + len(lengths)))
        for number, length in zip(ids, lengths, strict=True):
            self.arrived[number] = self.clock
            self.scheduler.submit(Generate(number, (number,) * length, max_tokens))
        return ids

    def step(self) -> None:
        plan = self.scheduler.plan()
        result, seconds = self.device.run(plan)
        self.clock += seconds
        late = plan.complete_prefill and len(plan.prefill) == 1 and plan.prefill[0].joins
        if late and self.clock > self.arrived[plan.prefill[0].request.request_id] + PATIENCE * GAP:
            self.late += 1  # a short prompt that has lost its patience is not cut
        elif plan.decode:
            self.gaps.append(seconds)
        self.plans.append(plan)
        self.read += [(chunk.request.request_id, chunk.end - chunk.start) for chunk in plan.prefill]
        for event in expanded(self.scheduler.advance(plan, result, seconds)):
            if isinstance(event, Tokens):
                self.answered.setdefault(event.request_id, self.clock)

    def run_until_answered(self, ids: list[int], steps: int = 20_000) -> None:
        for _ in range(steps):
            if all(number in self.answered for number in ids):
                return
            self.step()
        raise AssertionError("a prompt did not end")

    def waits(self, ids: list[int]) -> list[float]:
        return [self.answered[number] - self.arrived[number] for number in ids]


def h200() -> Simulation:
    return Simulation(make_scheduler(SchedulerSettings(max_token_gap=GAP), H200), Device())


def with_streams(rows: int) -> Simulation:
    subject = h200()
    subject.run_until_answered(subject.submit(*[100] * rows))
    for _ in range(30):
        subject.step()
    subject.gaps.clear()
    return subject


@pytest.mark.parametrize(("count", "median", "last"), [(8, 0.6, 1.1), (32, 2.2, 4.2)])
def test_prompts_at_once_answer_one_after_the_other_and_soon(count: int, median: float, last: float) -> None:
    subject = h200()
    ids = subject.submit(*[8000] * count)
    subject.run_until_answered(ids)
    waits = subject.waits(ids)
    assert list(subject.answered) == ids, "oldest first"
    assert waits[0] < 0.15
    assert statistics.median(waits) <= median
    assert waits[-1] <= last
    assert max(subject.gaps) <= GAP and not subject.late


def test_one_prompt_of_8000_tokens_is_read_gently() -> None:
    subject = with_streams(31)
    decode = subject.device.step + 31 * subject.device.row
    subject.run_until_answered(subject.submit(8000))
    assert max(subject.gaps) <= 3 * decode
    assert subject.waits([31])[0] < 1.0


@pytest.mark.parametrize(("tokens", "step", "waits"), [(8000, 0.0018, 1), (2000, 0.0018, 0), (8000, 0.05, 0)])
def test_a_long_prompt_is_received_in_a_step_of_its_own(tokens: int, step: float, waits: int) -> None:
    """Where steps are so short that it shows in them."""
    measured = dataclasses.replace(MEASURED, steps=((1, step),))
    scheduler = make_scheduler(SchedulerSettings(max_token_gap=0.5), dataclasses.replace(H200, calibration=measured))
    subject = Simulation(scheduler, Device(step=step))
    subject.run_until_answered(subject.submit(100))
    subject.submit(tokens, tokens)
    for _ in range(waits):
        subject.step()
        assert not subject.plans[-1].prefill
    subject.step()
    assert subject.plans[-1].prefill
    while len({chunk.request.request_id for plan in subject.plans for chunk in plan.prefill}) < 3:
        subject.step()
    started = next(index for index, plan in enumerate(subject.plans) if 2 in _prefilled(plan))
    ended = max(index for index, plan in enumerate(subject.plans) if 1 in _prefilled(plan))
    assert started - ended <= 2 + subject.device.parts, "the next one has been here for long"


def _prefilled(plan: Plan) -> list[int]:
    return [chunk.request.request_id for chunk in plan.prefill]


def test_one_prompt_of_60000_tokens_is_read_in_long_chunks() -> None:
    subject = with_streams(31)
    subject.run_until_answered(subject.submit(60_000))
    assert subject.waits([31])[0] <= 1.5
    assert max(subject.gaps) <= GAP
    assert max(tokens for _, tokens in subject.read) >= 4096


def test_the_pace_rises_with_the_backlog_and_falls_again() -> None:
    subject = with_streams(8)
    subject.run_until_answered(subject.submit(*[8000] * 4))
    crowded = subject.gaps.copy()
    for _ in range(20):
        subject.step()
    subject.gaps.clear()
    subject.run_until_answered(subject.submit(8000))
    assert max(subject.gaps) < max(crowded) <= GAP


def test_chunks_of_a_deep_prompt_keep_the_gap() -> None:
    """At its end, attention makes a token of this prompt four times as expensive as at its start."""
    depth = 5e-5
    facts = dataclasses.replace(H200, calibration=dataclasses.replace(MEASURED, depth_cost=depth))
    subject = Simulation(make_scheduler(SchedulerSettings(max_token_gap=GAP), facts), Device(depth=depth))
    subject.run_until_answered(subject.submit(*[100] * 31))
    for _ in range(20):
        subject.step()
    subject.gaps.clear()
    long = subject.submit(60_000)
    subject.run_until_answered(long)
    [wait] = subject.waits(long)
    assert max(subject.gaps) <= GAP
    assert wait <= 1.4 * 60_000 * Device.token * (1 + depth * 30_000)


def test_a_gentle_chunk_is_no_less_gentle_where_it_costs_more() -> None:
    """It spans as many steps, though attention makes each of its tokens a little more expensive."""

    def parts(depth: float) -> list[int | None]:
        facts = dataclasses.replace(H200, calibration=dataclasses.replace(MEASURED, depth_cost=depth))
        subject = Simulation(make_scheduler(SchedulerSettings(max_token_gap=GAP), facts), Device(depth=depth))
        subject.run_until_answered(subject.submit(*[100] * 4))
        for _ in range(20):
            subject.step()
        subject.plans.clear()
        subject.run_until_answered(subject.submit(8000))
        return [plan.prefill_parts for plan in subject.plans if plan.prefill]

    flat, deep = parts(0.0), parts(1e-6)
    assert len(flat) > 10 and len(set(flat[:-1])) == 1
    assert deep[: len(flat) - 1] == flat[:-1]


def test_chunks_beside_rows_have_few_lengths() -> None:
    subject = with_streams(4)
    subject.run_until_answered(subject.submit(*[8000] * 6, 3000, 30_000))
    ends = {chunk.end for plan in subject.plans for chunk in plan.prefill if chunk.joins}
    lengths = {
        chunk.end - chunk.start
        for plan in subject.plans
        if plan.decode
        for chunk in plan.prefill
        if chunk.end not in ends
    }
    assert lengths <= {64 << power for power in range(8)}


def test_a_plan_may_hold_the_end_of_one_prompt_and_the_start_of_the_next() -> None:
    subject = with_streams(4)
    subject.run_until_answered(subject.submit(*[5000] * 8))
    mixed = [plan for plan in subject.plans if plan.decode and len(plan.prefill) == 2]
    assert any(plan.prefill[0].joins and not plan.prefill[1].joins for plan in mixed)
    assert not any(plan.complete_prefill for plan in mixed if not plan.prefill[1].joins), "it spans steps"
    assert max(subject.gaps) <= GAP


def test_short_prompts_are_read_in_one_chunk_and_overtake() -> None:
    subject = with_streams(4)
    long, short = subject.submit(60_000, 300)
    subject.run_until_answered([short])
    assert long not in subject.answered
    assert subject.waits([short])[0] < 0.1
    plan = next(plan for plan in subject.plans if any(chunk.request.request_id == short for chunk in plan.prefill))
    assert [chunk.joins for chunk in plan.prefill] == [True]


def test_overtaking_is_bounded() -> None:
    """Short prompts without end cost a long one at most a quarter of the pace."""
    subject = with_streams(4)
    subject.read.clear()
    [long] = subject.submit(60_000)
    while long not in subject.answered:
        subject.submit(300, max_tokens=1)
        subject.step()
    of_short = sum(tokens for number, tokens in subject.read if number != long)
    assert 0 < of_short <= 60_000 / 3 + subject.scheduler._planner._prefill_tokens


def test_many_short_prompts_share_a_step_while_few_rows_decode() -> None:
    subject = with_streams(4)
    ids = subject.submit(*[200] * 20)
    subject.plans.clear()
    subject.run_until_answered(ids)
    reading = [plan for plan in subject.plans if plan.prefill]
    assert len(reading[0].prefill) > len(reading[0].decode), "they gain more than the rows lose"
    assert max(subject.gaps[1:]) < subject.gaps[0] <= GAP
    assert subject.waits(ids)[-1] <= 0.2


def test_short_prompts_are_cut_where_a_step_would_take_too_long() -> None:
    """On a slow device, 100 tokens take longer than the gap."""
    sizer = ChunkSizer(most=128, least=4, longest=256, max_gap=GAP)
    scheduler = GenerationScheduler(max_rows=8, prefill_tokens=256, chunk_sizer=sizer)
    subject = Simulation(scheduler, Device(step=0.01, row=0, build=0, token=0.001, parts=1))
    subject.run_until_answered(subject.submit(200))
    for _ in range(5):
        subject.step()
    subject.run_until_answered(subject.submit(100, 100))
    subject.gaps.clear()
    subject.run_until_answered(subject.submit(100, 100))
    assert max(subject.gaps) <= GAP


def test_rows_that_are_slower_than_the_gap_wait_for_a_few_of_their_steps() -> None:
    """And longer the longer a prompt has waited."""
    sizer = ChunkSizer(most=128, least=4, longest=256, max_gap=GAP)
    scheduler = GenerationScheduler(max_rows=8, prefill_tokens=256, chunk_sizer=sizer)
    subject = Simulation(scheduler, Device(step=0.1, row=0, build=0, token=0.001, parts=1))
    subject.run_until_answered(subject.submit(200))
    for _ in range(5):
        subject.step()
    subject.gaps.clear()
    (number,) = subject.submit(2000)
    subject.run_until_answered([number])
    waited = subject.answered[number] - subject.arrived[number]
    assert max(subject.gaps[:5]) <= 0.1 * STRETCH + 1e-9
    assert waited <= 2.5 * 2000 * 0.001, "it has two fifths of the device at least"
    assert max(subject.gaps) <= max(0.1 * STRETCH, min(WAIT_SHARE * waited, MOST_GAPS * GAP)) + 1e-9


def test_short_prompts_that_are_late_fill_the_batch_of_a_slow_device() -> None:
    """The gap alone would let prompts in so slowly that few rows decode together."""
    sizer = ChunkSizer(most=128, least=4, longest=256, max_gap=GAP)
    scheduler = GenerationScheduler(max_rows=32, prefill_tokens=256, chunk_sizer=sizer)
    subject = Simulation(scheduler, Device(step=0.1, row=0.005, build=0, token=0.01, parts=1))
    subject.submit(*[100] * 96, max_tokens=60)
    while not scheduler.idle:
        subject.step()
    work = 96 * 99 * 0.01 + 96 * 60 / 32 * (0.1 + 32 * 0.005)
    assert subject.clock <= 1.15 * work


def test_a_prompt_that_is_cached_is_not_part_of_the_backlog() -> None:
    cache = BlockPrefixCache(PrefixIndex(block=64, block_bytes=1, budget=10_000))
    scheduler = GenerationScheduler(max_rows=4, prefill_tokens=512, prefix_cache=cache)
    subject = Simulation(scheduler, Device())
    prompt = tuple(range(1000))
    scheduler.submit(Generate(1, prompt, 1))
    while not scheduler.idle:
        subject.step()
    scheduler.submit(Generate(2, (5,) * 5000, 9))
    scheduler.submit(Generate(3, (*prompt, 7, 8), 9))
    subject.step()
    subject.step()
    assert [chunk.request.request_id for chunk in subject.plans[-1].prefill] == [3, 2], "it is short, so it overtakes"


def test_checkpoints_do_not_slow_prefill_down() -> None:
    """A chunk ends where a checkpoint is saved; the step goes on with the same prompt."""
    cache = CheckpointPrefixCache(
        PrefixIndex(block=64, block_bytes=1, budget=10_000, from_checkpoints=True), lambda n: 1
    )
    scheduler = GenerationScheduler(max_rows=4, prefill_tokens=4096, prefix_cache=cache)
    scheduler.submit(Generate(1, (5,) * 5000, 9))
    plan = scheduler.plan()
    assert [(chunk.start, chunk.end) for chunk in plan.prefill] == [
        (0, 1024), (1024, 2048), (2048, 3072), (3072, 4096)
    ]  # fmt: skip
    assert all(chunk.save is not None for chunk in plan.prefill)


def test_prompt_logprobs_are_computed_at_once_and_keep_the_gap() -> None:
    subject = with_streams(4)
    subject.submit(8000, 8000, 8000, 8000)
    number = len(subject.arrived)
    subject.arrived[number] = subject.clock
    subject.scheduler.submit(Generate(number, (1,) * 20_000, 9, prompt_logprobs=0))
    subject.run_until_answered([number])
    longest = max(tokens for request_id, tokens in subject.read if request_id == number)
    assert longest * subject.device.token <= GAP


@settings(deadline=None, max_examples=examples(100))
@given(
    device=st.builds(
        Device,
        step=st.floats(0.001, 0.08),
        row=st.floats(0, 0.0005),
        build=st.floats(0, 0.004),
        token=st.floats(0.000005, 0.001),
        parts=st.sampled_from([1, 4]),
    ),
    arrivals=st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([1, 20, 300, 700, 3000, 9000]), st.integers(1, 60)),
        min_size=1,
        max_size=14,
    ),
)
def test_every_prompt_ends_and_every_row_moves(device: Device, arrivals: list[tuple[int, int, int]]) -> None:
    """For any device and arrivals: rows decode in every step, prompts end, and long ones end in their order."""
    sizer = ChunkSizer(most=512, least=16, longest=4096, free_seconds=0.002, max_gap=GAP)
    scheduler = GenerationScheduler(max_rows=6, prefill_tokens=1024, chunk_sizer=sizer)
    subject = Simulation(scheduler, device)
    measure(subject)
    ids: list[int] = []
    for pause, length, max_tokens in arrivals:
        for _ in range(pause):
            if not scheduler.idle:
                subject.step()
        ids += subject.submit(length, max_tokens=max_tokens)
    for _ in range(30_000):
        if scheduler.idle:
            break
        subject.step()
    assert scheduler.idle and set(ids) <= set(subject.answered), "a prompt did not end"
    long = [number for number, (_, length, _) in zip(ids, arrivals, strict=True) if length > 512]
    assert [number for number in subject.answered if number in long] == long, "long prompts end oldest first"
    read = sum(tokens for number, tokens in subject.read if number in ids)
    assert read == sum(length - 1 for _, length, _ in arrivals), "every token is read once"
    decode = device.step + 6 * device.row
    # A chunk has at least 16 tokens, and the cost of building it is known only as part of its tokens' cost.
    extra = 16 * device.token + 2 * device.build
    longest = max(GAP, decode * (1 + SHARE * 5 / 4))
    if decode + extra > GAP:
        waited = max(subject.answered[number] - subject.arrived[number] for number in ids)
        longest = max(GAP, STRETCH * decode, min(WAIT_SHARE * waited, MOST_GAPS * GAP))
    assert max(subject.gaps, default=0) <= longest + extra


def measure(subject: Simulation) -> None:
    """Run a prompt alone, a row alone, and both together."""
    [first] = subject.submit(3000, max_tokens=300)
    subject.run_until_answered([first])
    for _ in range(10):
        subject.step()
    subject.run_until_answered(subject.submit(3000, max_tokens=1))
    while not subject.scheduler.idle:
        subject.step()
    subject.gaps.clear()
