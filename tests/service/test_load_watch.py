"""The progress of loads as the log and a terminal tell it."""

from __future__ import annotations

import io
import logging

import pytest

from millstream.cli.live_line import LiveLine, live_line
from millstream.loading.progress import LINE_SECONDS, LoadWatch
from millstream.model_facts import LoadProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_log_tells_what_takes_longer_than_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock, loads = Clock(), [("big", LoadProgress())]
    watch = LoadWatch(lambda: loads, None, clock)
    watch.look()
    assert not caplog.messages, "a quick load says nothing"
    clock.now += LINE_SECONDS
    loads[0] = ("big", LoadProgress("reading weights", 0.25))
    watch.look()
    assert caplog.messages == ["big: reading weights: 25 %"]
    clock.now += LINE_SECONDS / 2
    watch.look()
    assert len(caplog.messages) == 1
    clock.now += LINE_SECONDS / 2
    loads[0] = ("big", LoadProgress("downloading", 0.5, 500, 1000))
    watch.look()
    assert caplog.messages[1].startswith("big: downloading: 500 bytes of 1.0 kB, 50 %")
    loads.clear()
    watch.look()
    loads.append(("big", LoadProgress()))
    watch.look()
    assert len(caplog.messages) == 2, "a new load has its own clock"


def test_a_terminal_shows_all_loads_in_one_line() -> None:
    shown: list[str] = []
    loads = [("a", LoadProgress("warming up", 0.5)), ("b", LoadProgress())]
    watch = LoadWatch(lambda: loads, shown.append)
    watch.look()
    loads.clear()
    watch.look()
    assert shown == ["a: warming up: 50 %; b: starting: its files, tokenizer and engine", ""]


def test_the_log_goes_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = io.StringIO()
    line = LiveLine(stream)
    line.write("before\n")
    line.show("x" * 30)
    line.write("a record\n")
    line.show("")
    line.write("after\n")
    long = "x" * 18 + "…"
    assert stream.getvalue() == f"before\n\r\x1b[2K{long}\r\x1b[2Ka record\n{long}\r\x1b[2Kafter\n"


def test_no_live_line_without_a_terminal() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        assert live_line(stream) is None
        assert handler.stream is stream
    finally:
        logging.getLogger().removeHandler(handler)
