"""A plot of panels over a common time axis, as an SVG file that is legible in light and dark mode. No dependencies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP, PANEL, SPACE, BOTTOM = 860, 70, 20, 34, 150, 76, 30
LIGHT = ("#ffffff", "#24292f", "#d8dee4", "#0969da", "#bc4c00", "#1a7f37", "#8250df")
DARK = ("#0d1117", "#d1d7e0", "#3d444d", "#58a6ff", "#f0883e", "#3fb950", "#bc8cff")
"""Ground, ink, grid, and a colour per series."""
COLOURS = len(LIGHT) - 3


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dots: bool = False
    """Separate points, not a line."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    series: Sequence[Series]
    highest: float = 0.0
    """The axis goes at least so far up."""


def ticks(highest: float, wanted: int = 4) -> list[float]:
    """Round numbers from 0 to at least `highest`."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [round(step * number, 12) for number in range(math.ceil(highest / step - 1e-9) + 1)]


def style() -> str:
    """Plain rules instead of variables: not every viewer of SVG files knows these."""
    shapes = (
        "text { font: 12px system-ui, sans-serif; } .title { font-weight: 600; font-size: 13px; } "
        ".line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }"
    )
    return f"{shapes} {_colours(LIGHT)} @media (prefers-color-scheme: dark) {{ {_colours(DARK)} }}"


def _colours(names: Sequence[str]) -> str:
    ground, ink, grid, *series = names
    rules = [f".ground {{ fill: {ground}; }} text {{ fill: {ink}; }} .grid {{ stroke: {grid}; }}"]
    rules += [f".l{number} {{ stroke: {one}; }} .f{number} {{ fill: {one}; }}" for number, one in enumerate(series)]
    return " ".join(rules)


def svg(title: str, x_label: str, panels: Sequence[Panel]) -> str:
    """One panel below the other. Every axis begins at 0."""
    across = ticks(max((x for panel in panels for one in panel.series for x, _ in one.points), default=0.0), 8)
    height = TOP + len(panels) * (PANEL + SPACE) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f"<style>{style()}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
        _text(LEFT, 20, title, "title"),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, TOP + SPACE - 26 + number * (PANEL + SPACE), across)
    parts += [_text((LEFT + WIDTH - RIGHT) / 2, height - 12, x_label, anchor="middle"), "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(panel: Panel, top: float, across: Sequence[float]) -> Iterable[str]:
    up = ticks(max((panel.highest, *(y for one in panel.series for _, y in one.points))))
    bottom = top + PANEL

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / across[-1] * (WIDTH - LEFT - RIGHT), bottom - y / up[-1] * PANEL

    yield _text(LEFT, top - 28, f"{panel.title}, {panel.unit}")
    for value in up:
        y = place(0, value)[1]
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        yield _text(LEFT - 8, y + 4, f"{value:,g}", anchor="end")
    for value in across:
        yield _text(place(value, 0)[0], bottom + 16, f"{value:,g}", anchor="middle")
    left = float(LEFT)
    for series in panel.series:
        colour = series.colour % COLOURS
        yield f'<rect x="{left:.1f}" y="{top - 19:.1f}" width="11" height="11" rx="2" class="f{colour}"/>'
        yield _text(left + 16, top - 10, series.name)
        left += 7 * len(series.name) + 36
        yield from _drawn(series, colour, [place(x, y) for x, y in series.points])


def _drawn(series: Series, colour: int, places: Sequence[tuple[float, float]]) -> Iterable[str]:
    if series.dots:
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" class="f{colour}"/>' for x, y in places)
    elif places:
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline class="line l{colour}" points="{corners}"/>'


def _text(x: float, y: float, text: str, name: str = "label", anchor: str = "start") -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
