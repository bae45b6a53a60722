"""Servers that the tests of several folders share: the demo model, and a tiny one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.config import Settings
from millstream.errors import ModelError
from millstream.models.source import resolve
from support.server import RunningServer, running
from support.tiny import write_servable


@pytest.fixture(scope="session")
def servable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that has a tokenizer and a chat template."""
    return write_servable(tmp_path_factory.mktemp("servable") / "tiny")


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model, downloaded as by `make serve`. Skips the test if it cannot be downloaded, except in CI."""
    try:
        return resolve(None, report=print).path
    except ModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs the demo model, which cannot be fetched: {error.message}")


@pytest.fixture(scope="session")
def demo(demo_path: Path) -> Iterator[RunningServer]:
    # What a calibration finds depends on what else this machine does, and tests count cached tokens.
    with running(Settings(port=0, max_batch=8, disabled=frozenset({"calibration"}))) as server:
        yield server


@pytest.fixture(scope="session")
def demo_client(demo: RunningServer) -> Iterator[Any]:
    import openai  # takes a second, and most tests do not need it

    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client
