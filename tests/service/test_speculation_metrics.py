"""Metrics of speculative decoding: from a model's card to the page that Prometheus reads."""

from __future__ import annotations

from millstream.model_facts import DraftCount, ModelCard, SpeculationCard
from millstream.service.metrics import Metrics


def page(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render()[0].decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs if "draft" in name or "verif" in name or "specul" in name}


def test_counts_by_model_and_drafter() -> None:
    metrics = Metrics()
    drafts = (DraftCount("grammar", 50, 45), DraftCount("prompt-lookup", 10, 0))
    cards = {
        "a": ModelCard("a", 1, "ready", speculation=SpeculationCard(("grammar", "prompt-lookup"), 12, drafts, 1.75)),
        "b": ModelCard("b", 1, "unloaded"),
    }
    for name in cards:
        metrics.watch(name, lambda name=name: cards[name])  # type: ignore[misc]
    expected = {
        'millstream_draft_tokens_total{drafter="grammar",model="a",outcome="accepted"}': 45.0,
        'millstream_draft_tokens_total{drafter="grammar",model="a",outcome="rejected"}': 5.0,
        'millstream_draft_tokens_total{drafter="prompt-lookup",model="a",outcome="accepted"}': 0.0,
        'millstream_draft_tokens_total{drafter="prompt-lookup",model="a",outcome="rejected"}': 10.0,
        'millstream_verifying_passes_total{model="a"}': 12.0,
        'millstream_speculation_gain{model="a"}': 1.75,
    }
    found = page(metrics)
    assert {name: found[name] for name in expected} == expected
    assert not any('model="b"' in name for name in found)
    metrics.unwatch("a")
    assert page(metrics) == {}
