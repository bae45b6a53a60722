"""Summarise a level: a table for people, JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from rich.table import Table

from millstream.bench.load import Result


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one level. Latencies are in milliseconds; percentiles are None without samples."""

    streams: int
    requests: int
    errors: int
    tokens: int
    seconds: float
    tokens_per_second: float
    first_p50: float | None
    first_p99: float | None
    gap_p50: float | None
    gap_p99: float | None
    gap_max: float | None
    health_p50: float | None
    health_p99: float | None
    health_failed: int
    first_error: str | None
    drafted: int = 0
    """Tokens of drafts that were verified, if the server tells it."""
    accepted: int = 0
    """Of these, those that were right."""
    cut: int = 0
    """Requests that were stopped when the level's time was up: what had arrived of them counts."""


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile of seconds, in milliseconds. Returns None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] * 1000


def figures(result: Result) -> Figures:
    good = [sample for sample in result.samples if sample.error is None]
    errors = [sample.error for sample in result.samples if sample.error is not None]
    begun = min(sample.started for sample in result.samples)
    ended = max(sample.ended for sample in result.samples)
    tokens = sum(sample.tokens for sample in good)
    firsts = [sample.first for sample in good if sample.first is not None]
    gaps = [gap for sample in good for gap in sample.gaps]
    health = [seconds for seconds in result.health if seconds is not None]
    return Figures(
        streams=result.streams,
        requests=len(result.samples),
        errors=len(errors),
        tokens=tokens,
        seconds=ended - begun,
        tokens_per_second=tokens / (ended - begun),
        first_p50=percentile(firsts, 0.5),
        first_p99=percentile(firsts, 0.99),
        gap_p50=percentile(gaps, 0.5),
        gap_p99=percentile(gaps, 0.99),
        gap_max=percentile(gaps, 1.0),
        health_p50=percentile(health, 0.5),
        health_p99=percentile(health, 0.99),
        health_failed=len(result.health) - len(health),
        first_error=errors[0] if errors else None,
        drafted=sum(sample.accepted_tokens + sample.rejected_tokens for sample in good),
        accepted=sum(sample.accepted_tokens for sample in good),
        cut=sum(sample.cut for sample in good),
    )


def table(title: str, levels: Sequence[Figures]) -> Table:
    result = Table(title=title, title_justify="left")
    headings = ["streams", "tokens/s", "first p50", "first p99", "gap p50", "gap p99", "health p99", "errors"]
    drafted = any(level.drafted for level in levels)
    for heading in [*headings, *(["drafts right"] if drafted else [])]:
        result.add_column(heading, justify="right")
    for level in levels:
        times = (level.first_p50, level.first_p99, level.gap_p50, level.gap_p99, level.health_p99)
        cells = [str(level.streams), f"{level.tokens_per_second:,.1f}", *map(milliseconds, times), str(level.errors)]
        result.add_row(*cells, *([_share(level)] if drafted else []))
    return result


def _share(level: Figures) -> str:
    """Of the tokens of drafts, those that were right."""
    return f"{level.accepted / level.drafted:.0%}" if level.drafted else "-"


def milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def save_json(path: Path, title: str, levels: Sequence[Figures]) -> None:
    content = {"title": title, "levels": [asdict(level) for level in levels]}
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))
