"""Fixtures of the pages' tests: one Chromium, a server with the demo model and a vision model, and scripted ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from millstream.config import ModelSpec, Settings
from support.browser import LAN_NAME, Opener, launched, opened
from support.scripted_server import ScriptedServer, scripted_server
from support.server import RunningServer, running
from support.tiny_vision import write_servable_qwen

if TYPE_CHECKING:
    from playwright.sync_api import Browser

VISION = "tiny-vision"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Closed with the module: while it is open, tests of other folders could not start an event loop."""
    with launched() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opener]:
    """`open_page(url)` gives a page in a fresh profile, and its watch. What the page may not do fails the test."""
    with ExitStack() as stack:
        yield lambda url, **options: stack.enter_context(opened(browser, url, **options))


@pytest.fixture(scope="session")
def page_server(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The demo model, and a tiny vision model that is loaded when it is used."""
    vision = write_servable_qwen(tmp_path_factory.mktemp("page") / "vision", "qwen2_5_vl")
    models = (ModelSpec(None), ModelSpec(str(vision), name=VISION, load="use", max_tokens=24))
    settings = Settings(models, port=0, max_batch=4, isolation="thread", disabled=frozenset({"calibration"}))
    with running(settings) as server:
        yield server


@pytest.fixture(scope="session")
def _scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("scripted") / "example-model"
    with scripted_server(folder, reasoning_format="think", allowed_hosts=(LAN_NAME,)) as server:
        yield server


@pytest.fixture
def scripted(_scripted: ScriptedServer) -> ScriptedServer:
    """A server whose model writes what `answer` says."""
    _scripted.answer = "Hello."
    _scripted.prompts.clear()
    return _scripted
