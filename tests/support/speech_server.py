"""A server with a tiny random Kokoro, shared by all tests of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream.config import ModelSpec, Settings
from support.server import RunningServer, running


@pytest.fixture(scope="session")
def speaking(tiny_model: Callable[[str], Path]) -> Iterator[RunningServer]:
    """Its model is called `voice`."""
    models = (ModelSpec(str(tiny_model("kokoro")), name="voice"),)
    with running(Settings(models, port=0, isolation="thread")) as server:
        yield server
