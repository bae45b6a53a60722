"""What bench/agents_day.py has seen: a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from long_table import byte_unit, quantity
from millstream.bench.report import percentile
from plot import Panel, Series, svg


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation. `at` and `first` are seconds: since the day began, and to the first token."""

    conversation: int
    number: int
    at: float
    first: float
    prompt_tokens: int
    cached_tokens: int
    reusable_tokens: int
    """How many of the prompt's tokens the server has seen in this conversation: the turn before, with its answer."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What the server said of itself, `at` seconds since the day began. Without the weights."""

    at: float
    kv_bytes: float
    prefix_cache_bytes: float
    active: float
    waiting: float


@dataclass(slots=True)
class Day:
    turns: list[Turn] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens of the short streams."""


def figures(day: Day) -> dict[str, float | None]:
    firsts = [turn.first for turn in day.turns]
    later = [turn for turn in day.turns if turn.number]
    cached, reusable = (sum(getattr(turn, name) for turn in later) for name in ("cached_tokens", "reusable_tokens"))
    return {
        "turns": len(day.turns),
        "prompt_tokens": sum(turn.prompt_tokens for turn in day.turns),
        "cached_tokens": sum(turn.cached_tokens for turn in day.turns),
        "reused_percent": 100 * cached / reusable if reusable else None,
        "first_p50": percentile(firsts, 0.5),
        "first_p99": percentile(firsts, 0.99),
        "gap_p50": percentile(day.gaps, 0.5),
        "gap_p99": percentile(day.gaps, 0.99),
        "kv_bytes": max((moment.kv_bytes for moment in day.moments), default=0.0),
        "prefix_cache_bytes": max((moment.prefix_cache_bytes for moment in day.moments), default=0.0),
        "seconds": max((turn.at + turn.first for turn in day.turns), default=0.0),
    }


LINES = (
    ("turns", "turns", ""),
    ("prompt tokens", "prompt_tokens", ""),
    ("of these from the prefix cache", "cached_tokens", ""),
    ("prefix hits: of what a turn shares with the one before", "reused_percent", "%"),
    ("first token, median", "first_p50", "s"),
    ("first token, p99", "first_p99", "s"),
    ("gap of the short streams, median", "gap_p50", "ms"),
    ("gap of the short streams, p99", "gap_p99", "ms"),
    ("KV cache of running rows, most", "kv_bytes", "bytes"),
    ("prefix cache, most", "prefix_cache_bytes", "bytes"),
    ("the whole day", "seconds", "seconds"),
)


def summary(days: Mapping[str, Day]) -> str:
    """A Markdown table with a column per build."""
    found = [figures(day) for day in days.values()]
    lines = [["", *days], ["---"] * (len(days) + 1)]
    for label, key, unit in LINES:
        cells = ["-" if (value := one[key]) is None else quantity(value, unit) for one in found]
        lines.append([label, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plot(title: str, days: Mapping[str, Day]) -> str:
    """Memory, first tokens, prefix cache hits and requests over time, as SVG. With several builds, series name them."""
    memory, firsts, hits, requests = [], [], [], []
    most = max(
        (moment.kv_bytes + moment.prefix_cache_bytes for day in days.values() for moment in day.moments), default=0
    )
    size, unit = byte_unit(most)
    for number, (name, day) in enumerate(days.items()):
        of = f", {name}" if len(days) > 1 else ""
        main, other = number, number + 2
        moments, turns = day.moments, day.turns
        memory.append(Series(f"KV cache of rows{of}", [(one.at, one.kv_bytes / size) for one in moments], main))
        memory.append(Series(f"prefix cache{of}", [(one.at, one.prefix_cache_bytes / size) for one in moments], other))
        firsts.append(Series(f"turns{of}", [(one.at, one.first) for one in turns], main, dots=True))
        shares = [(one.at, 100 * one.cached_tokens / one.prompt_tokens) for one in turns if one.prompt_tokens]
        hits.append(Series(f"turns{of}", shares, main, dots=True))
        requests.append(Series(f"running{of}", [(one.at, one.active) for one in moments], main))
        requests.append(Series(f"waiting{of}", [(one.at, one.waiting) for one in moments], other))
    panels = [
        Panel("Memory without weights", unit, memory),
        Panel("Time to first token", "seconds", firsts),
        Panel("Prompt tokens from the prefix cache", "%", hits, highest=100),
        Panel("Requests", "count", requests),
    ]
    return svg(title, "seconds", panels)
