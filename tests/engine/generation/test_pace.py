"""Streams in simulated time: first tokens come soon, and running streams keep their pace, on every kind of device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import pytest

from millstream.engine.generation.messages import Generate
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from support.device_profiles import CPU, H200, LLAMA_1B, LLAMA_8B, LLAMA_8B_PACKED, MAC, MIXTURE, badly_calibrated
from support.pipelined_device import PipelinedDevice
from support.simulated_streams import at, evenly, in_two_clumps, one_by_one, play

ARRIVALS: dict[str, Callable[[int], list[float]]] = {
    "within 60 ms": lambda streams: evenly(streams, 0.06),
    "within 20 ms": lambda streams: evenly(streams, 0.02),
    "in two clumps": in_two_clumps,
}

every_family = pytest.mark.parametrize("device", H200.values(), ids=H200.keys())
every_arrival = pytest.mark.parametrize("arrivals", ARRIVALS.values(), ids=ARRIVALS.keys())


@every_arrival
@every_family
def test_streams_that_start_together_answer_soon_and_without_long_gaps(
    device: PipelinedDevice, arrivals: Callable[[int], list[float]]
) -> None:
    """Each stream sends a second request when its first one ends, so many end and start at once again."""
    for streams in (32, 64):
        found = play(device, arrivals(streams))
        assert len(found.firsts) == 2 * streams
        assert found.late <= 3
        assert found.first_p50 <= 0.3
        # Against rows that all start at once and never wait for a prompt.
        ideal = 2 * 96 * device.decoding(streams) + 2 * streams * 80 * device.token
        assert found.device.clock <= ideal / 0.7


@every_family
def test_few_gaps_are_long(device: PipelinedDevice) -> None:
    """A part of those that the 99th percentile allows: other work of a server makes long ones as well."""
    found = play(device, evenly(64, 0.03))
    usual = at(found.gaps, 0.5)
    assert sum(gap > 3 * usual for gap in found.gaps) <= 0.005 * len(found.gaps)


@every_family
def test_a_load_that_measured_too_little_makes_no_long_gaps(device: PipelinedDevice) -> None:
    for streams in (32, 64):
        found = play(badly_calibrated(device), evenly(streams, 0.03))
        assert found.late <= 3
        assert found.first_p50 <= 0.4


@pytest.mark.parametrize("device", [LLAMA_8B, LLAMA_8B_PACKED, MIXTURE], ids=["8b", "packed", "mixture"])
def test_passes_of_new_shapes_cost_more_and_make_no_long_gaps(device: PipelinedDevice) -> None:
    for streams in (32, 64):
        found = play(replace(device, new_shape=0.025), evenly(streams, 0.03))
        assert found.late <= 3
        assert found.first_p50 <= 0.4


@pytest.mark.parametrize("device", [LLAMA_1B, LLAMA_8B, MIXTURE], ids=["1b", "8b", "mixture"])
def test_requests_that_come_one_by_one_make_no_long_gaps_and_do_not_starve(device: PipelinedDevice) -> None:
    rate = 32 / (96 * device.decoding(32)) / 1.6
    found = play(device, one_by_one(200, running=32, rate=rate), requests=1)
    assert found.late <= 3
    assert at(found.firsts, 0.5) <= 20 * device.decoding(32)
    assert at(found.firsts, 0.99) <= 0.4


def test_passes_are_few_and_beside_few_rows() -> None:
    """So few rows see a long step, and the fixed cost of a pass is paid few times."""
    for device in H200.values():
        found = play(device, evenly(64, 0.02), requests=1)
        reading = [plan for plan in found.plans if plan.prefill]
        assert len(reading) <= 8
        assert sum(len(plan.decode) for plan in reading if plan.complete_prefill and len(plan.decode) > 1) < 64


@every_family
def test_prompts_of_500_tokens_share_passes_as_short_ones_do(device: PipelinedDevice) -> None:
    """Each used to be long: cut, and read gently, though one step has room for many."""
    found = play(device, evenly(32, 0.005), requests=1, lengths=(450, 550))
    reading = [plan for plan in found.plans if plan.prefill]
    assert len(reading) <= 10
    assert all(chunk.start == 0 and chunk.joins for plan in reading for chunk in plan.prefill)
    assert max(found.gaps) <= 0.05 and max(found.firsts) <= 0.7


def test_a_pass_takes_all_that_wait_where_it_costs_little_more() -> None:
    """Most of a pass is unpacking weights: 16 prompts cost less than twice as much as two."""
    device, scheduler = running(LLAMA_8B_PACKED, 32)
    for number in range(16):
        scheduler.submit(Generate(100 + number, (number,) * 80, 10))
    while not (plan := scheduler.plan()).prefill:
        scheduler.advance(plan, *device.run(plan))
    assert len(plan.prefill) == 16


def test_a_pass_does_not_begin_in_a_step_where_rows_join() -> None:
    """Both cost the host as much as a decode step."""
    for device in (LLAMA_1B, LLAMA_8B):
        found = play(device, evenly(64, 0.03))
        running: set[int] = set()
        for plan in found.plans:
            joins = bool(set(plan.decode) - running)
            assert not (joins and plan.prefill and plan.decode) or plan.complete_prefill
            running = set(plan.decode)


def running(device: PipelinedDevice, rows: int) -> tuple[PipelinedDevice, GenerationScheduler]:
    """A scheduler whose rows have run for a while."""
    device = replace(device)
    scheduler = make_scheduler(SchedulerSettings(), device.facts())
    for number in range(rows):
        scheduler.submit(Generate(number, (number,) * 80, 1000))
    for _ in range(50):
        plan = scheduler.plan()
        scheduler.advance(plan, *device.run(plan))
    return device, scheduler


def test_a_single_prompt_beside_many_rows_does_not_wait_for_others() -> None:
    _, scheduler = running(LLAMA_1B, 32)
    scheduler.submit(Generate(99, (7,) * 80, 10))
    plan = scheduler.plan()
    assert [chunk.request.request_id for chunk in plan.prefill] == [99]
    assert not plan.complete_prefill and (plan.prefill_parts or 0) >= 2, "it spans steps"


def test_prompts_do_not_wait_for_long() -> None:
    """Ten prompts beside 32 rows are neither few nor many."""
    device, scheduler = running(LLAMA_1B, 32)
    for number in range(10):
        scheduler.submit(Generate(100 + number, (number,) * 80, 10))
    started, waited = device.clock, 0
    while not (plan := scheduler.plan()).prefill:
        scheduler.advance(plan, *device.run(plan))
        waited += 1
    assert len(plan.prefill) >= 5
    assert waited > 0 and device.clock - started <= 0.1


def test_prompts_wait_for_others_only_while_others_come() -> None:
    device, scheduler = running(LLAMA_8B, 32)
    for number in range(10):
        scheduler.submit(Generate(100 + number, (number,) * 80, 10))
    started = device.clock
    while not (plan := scheduler.plan()).prefill:
        scheduler.advance(plan, *device.run(plan))
    assert device.clock - started <= 4 * device.decoding(32)


def test_a_laptop_reads_prompts_one_by_one() -> None:
    found = play(MAC, evenly(16, 0.05), tokens=24, requests=1)
    assert found.late <= 3
    assert all(len(plan.prefill) <= 4 for plan in found.plans if plan.decode)


@pytest.mark.parametrize(("device", "streams"), [(MAC, 16), (CPU, 4)], ids=["mac", "cpu"])
def test_slow_devices_read_every_prompt_and_keep_streams_moving(device: PipelinedDevice, streams: int) -> None:
    """A prompt takes longer than the gap there, so it is cut, or late and whole."""
    found = play(device, evenly(streams, 0.05), tokens=48, requests=1)
    assert len(found.firsts) == streams
    reading = streams * (80 * device.token + device.weights)
    assert max(found.firsts) <= 6 * reading
    assert max(found.gaps) <= device.decoding(streams) + 100 * device.token + 2 * device.weights


@pytest.mark.parametrize("device", [LLAMA_8B, LLAMA_1B], ids=["8b", "1b"])
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
