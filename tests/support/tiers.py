"""Two tiers of tests: what runs by default, and what is left to `--whole`.

A test that repeats a kind of test on more families, formats, shapes or seeds is marked `whole`. By default a
representative of every kind runs; `--whole` runs all of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

whole = pytest.mark.whole
_state = {"whole": False}


def run_whole(wanted: bool) -> None:
    """Called by conftest before any test module is imported."""
    _state["whole"] = wanted


def is_whole() -> bool:
    return _state["whole"]


def examples(most: int) -> int:
    """The number of Hypothesis examples: `most` with `--whole`, a quarter of them by default."""
    return most if _state["whole"] else max(most // 4, 10)


def some(values: Iterable[Any], default: Container[Any]) -> list[Any]:
    """Values for `parametrize`: those in `default` always run, the others with `--whole`. A tuple stands for several
    arguments."""
    return [value if value in default else _left(value) for value in values]


def _left(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=whole)
