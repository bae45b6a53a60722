"""The history of the last hour: samples from counters, quantiles, bounds."""

from __future__ import annotations

import asyncio
import random

import pytest

from millstream.errors import BadRequest, StepFailed
from millstream.model_facts import ModelCard
from millstream.service.activity import Activities, Durations
from millstream.service.history import SERIES, History
from millstream.service.journal import Journal
from support.hubs import on_loop


def test_quantiles_are_exact_to_five_percent() -> None:
    dice = random.Random(1)
    values = sorted(dice.lognormvariate(-4, 1.5) for _ in range(20_000))
    durations = Durations()
    assert durations.quantile(0.5) is None
    for value in values:
        durations.add(value)
    for share in (0.01, 0.5, 0.9, 0.99):
        assert durations.quantile(share) == pytest.approx(values[int(share * len(values))], rel=0.06)
    durations.add(0.0)
    durations.add(1e9)
    assert durations.quantile(1.0) is not None, "what is out of range is counted at its end"


def test_a_sample_says_what_happened_in_its_interval() -> None:
    cards = [ModelCard("a", 0, "ready", active=2, waiting=1, memory_bytes=10, kv_tokens=7, prefix_cache_bytes=3)]
    activities = Activities()
    history = History(lambda: cards, activities, samples=3)
    journal = Journal(history.ended)
    activity = activities.of("a")
    activity.generated_tokens, activity.prompt_tokens, activity.cached_tokens = 50, 20, 5
    activity.first_token.add(0.1)
    for error in (None, BadRequest("no"), StepFailed("bang")):
        record = journal.open("alias", "chat")
        record.found("a")
        journal.end(record, "done" if error is None else "failed", error=error)
    journal.end(journal.open("made up", "chat"), "failed", error=StepFailed("bang"))
    history.sample(100.0, 5.0)
    cards.append(ModelCard("b", 0, "loading"))
    history.sample(105.0, 5.0)
    view = history.view(0.0)
    assert (view.interval, view.times, view.models.keys()) == (5.0, [100.0, 105.0], {"a", "b"})
    assert all(
        set(model) == set(SERIES) and {len(each) for each in model.values()} == {2} for model in view.models.values()
    )
    a, b = view.models["a"], view.models["b"]
    assert a["generated_tokens_per_second"] == [10.0, 0.0] and a["prompt_tokens_per_second"] == [4.0, 0.0]
    assert a["cached_share"] == [0.25, None] and a["requests"] == [3, 0] and a["failures"] == [1, 0]
    assert a["first_token_p50"] == [pytest.approx(0.1, rel=0.06), None] and a["gap_p99"] == [None, None]
    assert (a["active"], a["waiting"], a["kv_tokens"], a["memory_bytes"]) == ([2, 2], [1, 1], [7, 7], [10, 10])
    assert b["active"] == [None, 0], "it was not there at first"
    assert history.view(100.0).times == [105.0] and history.view(105.0).models == {}
    history.sample(110.0, 5.0)
    history.sample(115.0, 5.0)
    assert history.view(0.0).times == [105.0, 110.0, 115.0], "bounded"


@on_loop
async def test_it_samples_by_itself() -> None:
    sampled = asyncio.Event()

    def cards() -> tuple[ModelCard, ...]:
        if history.view(0.0).times:
            sampled.set()
        return ()

    history = History(cards, Activities(), interval=0.01)
    history.start()
    await sampled.wait()
    history.close()
