"""bench/step_times.py: what it notes exists, what it shows of notes, and both loads against a server."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import models
import step_times
from step_times import STEP, TURN, Noted, longest, parts_of, report


@pytest.fixture
def tracing() -> ModuleType:
    """The module itself: Python may have another one of this name."""
    spec = importlib.util.spec_from_file_location("step_trace", step_times.TRACE / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_everything_that_is_noted_exists(tracing: ModuleType) -> None:
    """Else a load would be noted in part after something was renamed."""
    for name, kinds in tracing.NOTED.items():
        module = importlib.import_module(name)
        for kind, methods in kinds.items():
            assert set(methods) <= set(vars(getattr(module, kind))), f"{name}.{kind}"


def test_the_longest_steps_are_shown_with_their_parts() -> None:
    notes = [Noted(STEP, at, at + took) for at, took in ((0.0, 0.5), (1.0, 0.001), (2.0, 0.004), (3.0, 0.003))]
    notes += [Noted("inside", 2.001, 2.003), Noted("short", 2.003, 2.0031), Noted("after", 2.5, 2.9)]
    notes += [Noted("planning", 2.997, 2.999), Noted(TURN, 2.996, 3.0035)]
    assert [each.began for each in longest(notes, 0.9, 9.0, 2)] == [2.0, 3.0]
    assert [each.name for each in parts_of(notes[2], notes, 0.0005)] == [STEP, "inside"]
    assert [each.name for each in parts_of(notes[3], notes, 0.0005)] == [STEP, "planning", TURN]
    text = report(notes, 0.9, 9.0, count=1, least=0.0005)
    assert "3 steps, median 3.00, p99 4.00" in text and "after 1100.0: 4.00" in text
    assert "    1.00     2.00  inside" in text
    assert report(notes, 5.0, 9.0, count=1, least=0.0) == "no step was noted"


@pytest.mark.parametrize(("load", "isolation"), [("streams", "process"), ("beside", "thread")])
def test_a_server_is_noted(load: str, isolation: str, tmp_path: Path) -> None:
    folder = models.random_model(tmp_path / "tiny", models.TINY)
    words = [load, "--model", str(folder), "--streams", "2", "--requests", "1", "--prompt", "300", "--prompts", "1"]
    words += ["--least", "0", "--steps", "2", "--ours", f"--isolation {isolation} --speculation off"]
    words += ["--output-tokens", "5" if load == "streams" else "20000"]
    run = subprocess.run(
        [sys.executable, step_times.__file__, *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    for part in ("steps, median", STEP, TURN, "GenerationScheduler.plan", "Batch.launch"):
        assert part in run.stdout
