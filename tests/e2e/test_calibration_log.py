"""What the calibration found is told at the log level `debug`, and not at `info`."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from millstream.config import Settings
from support.server import running

VERIFYING = "verifying drafts by rows x tokens: 1 x "


def test_the_log_tells_what_was_measured_and_chosen(
    servable: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.backend.generation.preparation.MIN_WEIGHT_BYTES", 0)
    settings = Settings(models=(str(servable),), port=0, isolation="thread")
    with caplog.at_level(logging.DEBUG, "millstream.loading"), running(settings):
        pass
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    told = [line.removeprefix("tiny: ") for line in lines if line.startswith("tiny: ")]
    starts = ("chunks by tokens: 16: ", "decode steps by rows: 1: ", "saving a prefix: ", "prefill: ", VERIFYING)
    assert [line.startswith(start) for line, start in zip(told, starts, strict=True)] == [True] * 5, told
    assert not any("chunks by tokens" in record.getMessage() for record in caplog.records if record.levelno > 10)
