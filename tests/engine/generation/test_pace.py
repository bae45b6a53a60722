"""Streams that start together, in simulated time: first tokens come soon, and running streams keep their pace."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from statistics import median

import pytest

from millstream.bench.report import percentile
from millstream.engine.generation.decode_cost import DecodeCost
from millstream.engine.generation.messages import Generate, Tokens
from millstream.engine.generation.plan import Plan
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.messages import Finished
from support.pipelined_device import PipelinedDevice

LARGE = PipelinedDevice(
    ((1, 0.0052), (32, 0.0062), (64, 0.0077)),
    launch=0.002,
    build=0.004,
    join=0.004,
    encode=0.005,
    token=0.000025,
    weights=0.0045,
)
"""8 billion parameters on an H200."""

SMALL = PipelinedDevice(
    ((1, 0.0015), (32, 0.0022), (64, 0.0032)),
    launch=0.0009,
    build=0.0018,
    join=0.002,
    encode=0.0022,
    token=4.5e-6,
    weights=0.0008,
)
"""1.2 billion, where the host takes longer than the device."""

DEEP = PipelinedDevice(
    ((1, 0.0028), (32, 0.0035), (64, 0.0044)),
    launch=0.0016,
    build=0.003,
    join=0.003,
    encode=0.003,
    token=5e-6,
    weights=0.001,
)
"""1 billion in many layers."""

SLOW_HOST = replace(LARGE, build=0.006, encode=0.009)
LAPTOP = PipelinedDevice(
    ((1, 0.02), (8, 0.03), (32, 0.06), (64, 0.1)),
    launch=0.003,
    build=0.003,
    join=0.001,
    encode=0.003,
    token=0.001,
    weights=0.02,
)


@dataclass
class Run:
    """Streams over a device: when tokens came."""

    device: PipelinedDevice
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    def start(self, streams: int, *, within: float = 0.05, tokens: int = 96, requests: int = 2) -> Run:
        """Each stream sends some requests, one after the other."""
        device = self.device = replace(self.device)
        scheduler = make_scheduler(SchedulerSettings(), device.facts())
        draw = random.Random(streams)
        coming = sorted((draw.random() * within, requests) for _ in range(streams))
        arrived: dict[int, tuple[float, int]] = {}
        last: dict[int, float] = {}
        while coming or not scheduler.idle:
            while coming and coming[0][0] <= device.clock:
                arrived[number := len(arrived)] = coming.pop(0)
                prompt = tuple(draw.randrange(2000) for _ in range(draw.randrange(60, 100)))
                scheduler.submit(Generate(number, prompt, tokens))
            if scheduler.idle:
                device.clock = coming[0][0]
                continue
            plan = scheduler.plan()
            result, seconds = device.run(plan)
            self.plans.append(plan)
            for event in scheduler.advance(plan, result, seconds):
                number = getattr(event, "request_id", -1)
                if isinstance(event, Tokens):
                    if number in last:
                        self.gaps.append(device.clock - last[number])
                    else:
                        self.firsts.append(device.clock - arrived[number][0])
                    last[number] = device.clock
                elif isinstance(event, Finished) and arrived[number][1] > 1:
                    coming.append((device.clock + 0.002 + 0.01 * draw.random(), arrived[number][1] - 1))
                    coming.sort()
        return self


def late(gaps: list[float]) -> float:
    """The 99th percentile, in medians."""
    return (percentile(gaps, 0.99) or 0.0) / (percentile(gaps, 0.5) or 1.0)


@pytest.mark.parametrize("streams", [32, 64])
@pytest.mark.parametrize("device", [LARGE, SMALL, DEEP, SLOW_HOST], ids=["large", "small", "deep", "slow host"])
def test_streams_that_start_together_answer_soon_and_without_long_gaps(device: PipelinedDevice, streams: int) -> None:
    found = Run(device).start(streams)
    assert median(found.firsts) <= 0.4
    assert late(found.gaps) <= 3
    assert len(found.firsts) == 2 * streams


@pytest.mark.parametrize("device", [LARGE, SMALL, DEEP], ids=["large", "small", "deep"])
def test_gentle_steps_cost_little_throughput(device: PipelinedDevice) -> None:
    """Against 64 rows that never wait for a prompt."""
    found = Run(device).start(64, requests=1)
    decoding = 96 * device.steps[-1][1]
    prompts = 64 * 96 * device.token
    assert found.device.clock <= 0.05 + 1.25 * decoding + 1.6 * prompts


def test_passes_are_as_large_as_what_runs_already() -> None:
    """So few rows see a long step, and the fixed cost of a pass is paid few times."""
    found = Run(SMALL).start(64, requests=1)
    reading = [plan for plan in found.plans if plan.prefill]
    assert len(reading) <= 8
    for plan in reading:
        if plan.decode and plan.complete_prefill:
            assert len(plan.prefill) >= len(plan.decode)
    assert sum(len(plan.decode) for plan in reading if plan.complete_prefill) < 64


def test_a_single_prompt_beside_many_rows_does_not_wait_for_others() -> None:
    device = replace(SMALL)
    scheduler = make_scheduler(SchedulerSettings(), device.facts())
    for number in range(32):
        scheduler.submit(Generate(number, (number,) * 80, 1000))
    for _ in range(50):
        plan = scheduler.plan()
        scheduler.advance(plan, *device.run(plan))
    scheduler.submit(Generate(99, (7,) * 80, 10))
    plan = scheduler.plan()
    assert [chunk.request.request_id for chunk in plan.prefill] == [99]
    assert not plan.complete_prefill and (plan.prefill_parts or 0) >= 2, "it spans steps"


def test_prompts_do_not_wait_for_long() -> None:
    """Ten prompts beside 32 rows are neither few nor many."""
    device = replace(SMALL)
    scheduler = make_scheduler(SchedulerSettings(), device.facts())
    for number in range(32):
        scheduler.submit(Generate(number, (number,) * 80, 1000))
    for _ in range(50):
        plan = scheduler.plan()
        scheduler.advance(plan, *device.run(plan))
    for number in range(10):
        scheduler.submit(Generate(100 + number, (number,) * 80, 10))
    started, waited = device.clock, 0
    while not (plan := scheduler.plan()).prefill:
        scheduler.advance(plan, *device.run(plan))
        waited += 1
    assert len(plan.prefill) >= 5
    assert waited > 0 and device.clock - started <= 0.1


def test_a_laptop_reads_prompts_one_by_one() -> None:
    found = Run(LAPTOP).start(16, tokens=24, requests=1)
    assert late(found.gaps) <= 3
    assert all(len(plan.prefill) <= 4 for plan in found.plans if plan.decode)


@pytest.mark.parametrize("device", [LARGE, SMALL], ids=["large", "small"])
def test_a_prompt_of_8000_tokens_makes_no_long_gaps(device: PipelinedDevice) -> None:
    device = replace(device)
    scheduler = make_scheduler(SchedulerSettings(), device.facts())

    def step() -> float:
        plan = scheduler.plan()
        result, seconds = device.run(plan)
        scheduler.advance(plan, result, seconds)
        return seconds

    for number in range(4):
        scheduler.submit(Generate(number, (number,) * 100, 10_000))
    alone = median([step() for _ in range(100)][50:])
    scheduler.submit(Generate(9, tuple(range(8000)), 1))
    beside = []
    while 9 in scheduler._requests:
        beside.append(step())
    assert max(beside) <= 3 * alone
    assert sum(beside) <= 1.0


def test_what_a_step_costs_is_known_for_rows_that_have_not_run() -> None:
    cost = DecodeCost([(1, 0.005), (4, 0.0052), (16, 0.0064)])
    assert [cost.seconds(rows) for rows in (1, 4, 10, 16, 28)] == pytest.approx([0.005, 0.0052, 0.0058, 0.0064, 0.0076])
    for _ in range(100):
        cost.observe(4, 0.0104)
    assert cost.seconds(16) == pytest.approx(0.0128, rel=1e-3), "the device is twice as slow as at load"


def test_more_rows_never_cost_less() -> None:
    cost = DecodeCost([(1, 0.005), (4, 0.004), (16, 0.006)])
    found = [cost.seconds(rows) or 0.0 for rows in range(1, 65)]
    assert found == sorted(found)


def test_without_a_calibration_all_steps_count_as_one() -> None:
    cost = DecodeCost()
    assert cost.seconds(8) is None and not cost.known
    cost.observe(8, 0.01)
    assert cost.seconds(1) == cost.seconds(64) == 0.01
