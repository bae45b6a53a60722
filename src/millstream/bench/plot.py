"""Plot the results. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from millstream.bench.report import Figures
from millstream.errors import MillstreamError

PANELS = (
    ("tokens per second", "tokens_per_second"),
    ("time to first token, p50, ms", "first_p50"),
    ("inter-token latency, p99, ms", "gap_p99"),
)


def save_plot(path: Path, servers: Mapping[str, Sequence[Figures]]) -> None:
    """One panel per metric, one line per server, over the number of streams. Raises if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MillstreamError("a plot needs matplotlib: pip install 'millstream[bench]'") from error
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    for index, (heading, name) in enumerate(PANELS, 1):
        axes = figure.add_subplot(1, len(PANELS), index)
        for server, levels in servers.items():
            points = [(level.streams, _value(level, name)) for level in levels]
            known = [(streams, value) for streams, value in points if value is not None]
            axes.plot([streams for streams, _ in known], [value for _, value in known], marker="o", label=server)
        axes.set(xscale="log", yscale="log", title=heading, xlabel="streams")
        streams = sorted({level.streams for levels in servers.values() for level in levels})
        axes.set_xticks(streams, [str(number) for number in streams], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def _value(level: Figures, name: str) -> float | None:
    values = {
        "tokens_per_second": level.tokens_per_second,
        "first_p50": level.first_p50,
        "gap_p99": level.gap_p99,
    }
    return values[name]
