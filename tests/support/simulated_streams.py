"""Streams over a scheduler and a simulated device: when requests arrive, and when their tokens come."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from millstream.engine.generation.messages import Generate, Tokens
from millstream.engine.generation.plan import Plan
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.messages import Finished, expanded
from support.pipelined_device import PipelinedDevice

PROMPT = (60, 100)


def at(values: Sequence[float], share: float) -> float:
    """A percentile."""
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def evenly(streams: int, within: float) -> list[float]:
    return [within * index / streams for index in range(streams)]


def in_two_clumps(streams: int, apart: float = 0.04) -> list[float]:
    return [0.002 * index / streams + (apart if index >= streams // 2 else 0.0) for index in range(streams)]


def one_by_one(streams: int, *, running: int, rate: float, seed: int = 1) -> list[float]:
    """Some that start at once, and then a Poisson process."""
    draw = random.Random(seed)
    found = evenly(running, 0.02)
    clock = 1.0
    for _ in range(streams - running):
        clock += draw.expovariate(rate)
        found.append(clock)
    return found


@dataclass
class Run:
    """What happened, in seconds."""

    device: PipelinedDevice
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Of each plan."""
    tokens: int = 0

    @property
    def first_p50(self) -> float:
        return at(self.firsts, 0.5)

    @property
    def late(self) -> float:
        """The 99th percentile of gaps, in medians."""
        return at(self.gaps, 0.99) / at(self.gaps, 0.5)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.device.clock


def play(
    device: PipelinedDevice,
    arrivals: Sequence[float],
    *,
    tokens: int = 96,
    requests: int = 2,
    seed: int = 0,
    think: float = 0.003,
    settings: SchedulerSettings | None = None,
    lengths: tuple[int, int] = PROMPT,
) -> Run:
    """Each stream sends some requests, one after the other: the next one `think` seconds after an answer, or a little
    later."""
    device = replace(device, _pending=[], _shapes=set())
    found = Run(device)
    scheduler = make_scheduler(settings or SchedulerSettings(), device.facts(max(64, len(arrivals))))
    draw = random.Random(seed)
    coming = [(when, index, requests) for index, when in enumerate(sorted(arrivals))]
    arrived: dict[int, tuple[float, int]] = {}
    last: dict[int, float] = {}
    numbers = len(coming)
    while coming or not scheduler.idle:
        while coming and coming[0][0] <= device.clock:
            when, _, left = heapq.heappop(coming)
            arrived[number := len(arrived)] = (when, left)
            prompt = tuple(draw.randrange(2000) for _ in range(draw.randrange(*lengths)))
            scheduler.submit(Generate(number, prompt, tokens))
        if scheduler.idle:
            device.clock = coming[0][0]
            continue
        plan = scheduler.plan()
        result, seconds = device.run(plan)
        found.plans.append(plan)
        found.times.append(seconds)
        for event in expanded(scheduler.advance(plan, result, seconds)):
            number = getattr(event, "request_id", -1)
            if isinstance(event, Tokens):
                found.tokens += len(event.tokens)
                if number in last:
                    found.gaps.append(device.clock - last[number])
                else:
                    found.firsts.append(device.clock - arrived[number][0])
                last[number] = device.clock
            elif isinstance(event, Finished) and arrived[number][1] > 1:
                numbers += 1
                again = device.clock + think + 0.01 * draw.random()
                heapq.heappush(coming, (again, numbers, arrived[number][1] - 1))
    return found
