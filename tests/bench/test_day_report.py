"""The plot and the table of bench/agents_day.py."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from day_report import Day, Moment, Turn, figures, plot, summary
from plot import Panel, Series, svg, ticks

SVG = "{http://www.w3.org/2000/svg}"
DAY = Day(
    turns=[Turn(0, 0, 0.5, 0.2, 1000, 0, 0), Turn(0, 1, 2.0, 0.1, 2000, 1088, 1100), Turn(1, 0, 1.0, 0.4, 900, 64, 0)],
    moments=[Moment(0.0, 0, 0, 0, 0), Moment(1.0, 3 * 2**30, 2**30, 5, 2), Moment(2.0, 2**30, 2**30, 3, 0)],
    gaps=[0.002] * 99 + [0.050],
)


@pytest.mark.parametrize(
    ("highest", "expected"),
    [
        (0, [0, 1]),
        (1, [0, 0.5, 1]),
        (70, [0, 20, 40, 60, 80]),
        (0.3, [0, 0.1, 0.2, 0.3]),
        (4000, [0, 1000, 2000, 3000, 4000]),
    ],
)
def test_ticks_are_round_and_reach_the_highest_value(highest: float, expected: list[float]) -> None:
    assert ticks(highest) == expected


def test_everything_drawn_lies_inside_the_picture() -> None:
    root = ElementTree.fromstring(plot("a <day> & a night", {"before": DAY, "millstream": DAY}))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    circles = root.findall(f"{SVG}circle")
    lines = root.findall(f"{SVG}polyline")
    assert (len(circles), len(lines)) == (2 * 2 * 3, 2 * 4)
    places = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in circles]
    places += [tuple(map(float, pair.split(","))) for one in lines for pair in one.attrib["points"].split()]  # type: ignore[misc]
    places += [(float(one.attrib["x"]), float(one.attrib["y"])) for one in root.findall(f"{SVG}text")]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    texts = [one.text for one in root.findall(f"{SVG}text")]
    assert {"a <day> & a night", "Memory without weights, GiB", "seconds"} <= set(texts)


def test_it_has_colours_for_light_and_dark() -> None:
    text = svg("t", "x", [Panel("p", "u", [Series("s", [(0, 1), (1, 2)], 0)])])
    light, dark = text.split("prefers-color-scheme: dark")
    assert ".ground { fill: #ffffff; }" in light
    assert ".ground { fill: #0d1117; }" in dark


def test_a_higher_value_stands_higher() -> None:
    root = ElementTree.fromstring(svg("t", "x", [Panel("p", "u", [Series("s", [(0, 1), (1, 2), (2, 0)], 0)])]))
    line = root.find(f"{SVG}polyline")
    assert line is not None
    ys = [float(pair.split(",")[1]) for pair in line.attrib["points"].split()]
    assert ys[1] < ys[0] < ys[2]


def test_a_panel_without_points_is_drawn() -> None:
    ElementTree.fromstring(svg("t", "x", [Panel("p", "u", [Series("s", [], 0), Series("d", [], 1, dots=True)])]))


def test_the_table() -> None:
    found = figures(DAY)
    assert found["cached_tokens"] == 1152
    assert found["reused_percent"] == pytest.approx(100 * 1088 / 1100)
    assert (found["first_p50"], found["gap_p99"]) == (pytest.approx(200), pytest.approx(2))
    lines = summary({"before": DAY, "millstream": Day()}).splitlines()
    assert lines[0] == "|  | before | millstream |"
    assert "| KV cache of running rows, most | 3 GiB | 0 MiB |" in lines
    assert "| first token, median | 0.2 s | - |" in lines
