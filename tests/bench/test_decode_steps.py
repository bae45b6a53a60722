"""bench/decode_steps.py: it measures every number of rows, and counts what a step is made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import decode_steps


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_each_number_of_rows_has_a_line(
    family: str, tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_model(family)), "--rows", "1,3", "--steps", "2", "--temperature", "1", "--top-p", "0.9"]
    assert decode_steps.main(words) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    found = [re.fullmatch(r" *(\d+) rows: .* matmuls ([\d.]+) ms; (\d+) operations", line) for line in lines]
    assert [each and int(each[1]) for each in found] == [1, 3]
    assert all(each and float(each[2]) > 0 and int(each[3]) > 100 for each in found)
