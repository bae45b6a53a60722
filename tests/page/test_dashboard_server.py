"""The dashboard of a real server: figures move, buttons load and unload, failures and wrong keys are told."""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from millstream.config import ModelSpec, Settings
from millstream.engine.protocols import Progress, ignore_progress
from millstream.loading.backends import generation_backend
from millstream.loading.settings import EngineSettings
from millstream.model_facts import GenerationFacts
from millstream.models.source import ModelSource
from support.browser import PATIENCE, Opener, screenshot
from support.fake import Gate
from support.server import RunningServer, running
from support.wrapped import Gated

expect.set_options(timeout=PATIENCE)
SECONDS = PATIENCE / 1000


class Held(Gated):
    """The real backend, whose load waits at a gate when a quarter of it is done, and whose steps wait at another."""

    def __init__(self, source: ModelSource, settings: EngineSettings, load: Gate, step: Gate) -> None:
        super().__init__(generation_backend(source, settings), step)
        self._load = load

    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        report(0.25)
        self._load.pass_through()
        return super().load(report)


class Stage:
    """A server whose model is loaded by the test, and a pool for requests that are answered later."""

    def __init__(self, server: RunningServer, load: Gate, step: Gate, pool: ThreadPoolExecutor) -> None:
        self.server = server
        self.load = load
        self.step = step
        self.pool = pool

    def ask(self, **changes: Any) -> httpx.Response:
        body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True, **changes}
        return httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=SECONDS)


@pytest.fixture
def stage(servable: Path) -> Iterator[Stage]:
    load, step = Gate(), Gate()

    def make(source: ModelSource, settings: EngineSettings) -> Held:
        return Held(source, settings, load, step)

    settings = Settings((str(servable),), port=0, load="use", max_batch=4, memory=10**9, grace=SECONDS)
    with ThreadPoolExecutor(8) as pool, running(settings, make) as server:
        yield Stage(server, load, step, pool)
        load.open()
        step.open()


def opened(page: Page) -> Page:
    page.goto("/dashboard")
    expect(page.locator("#connection")).to_have_text("Live")
    return page


def test_a_model_is_loaded_used_and_unloaded_while_the_figures_move(stage: Stage, open_page: Opener) -> None:
    page = opened(open_page(stage.server.url)[0])
    card = page.get_by_role("article")
    expect(card).to_contain_text("Not loaded")
    card.get_by_role("button", name="Load").click()
    expect(card).to_contain_text("Loading 25 %")
    stage.load.open()
    expect(card).to_contain_text("Ready")
    expect(card).to_contain_text(re.compile(r"Thread \d+"))

    answers = [stage.pool.submit(stage.ask, max_tokens=100) for _ in range(6)]
    expect(card).to_contain_text("4 of 4 running, 2 queued")
    rows = page.locator("#requests tbody tr")
    expect(rows.filter(has_text="Prefill")).not_to_have_count(0)
    expect(rows).to_have_count(6)
    card.get_by_role("button", name="Unload").click()
    expect(page.get_by_role("dialog")).to_contain_text("6 requests are still running.")
    page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    expect(card.get_by_role("button")).to_have_text("Unloading…")
    stage.step.open()
    assert [answer.result(SECONDS).status_code for answer in answers] == [200] * 6
    expect(card).to_contain_text("Not loaded")
    expect(rows.filter(has_text="Done")).to_have_count(6)
    for timeline in rows.locator(".timeline").all():
        expect(timeline).to_have_attribute("title", re.compile(r"prepare .*, queue .*, prefill .*, decode "))

    speed = page.get_by_role("slider", name="Tokens generated per second")
    expect(page.locator("#plot-generated path.line-1").first).to_have_attribute("d", re.compile("^M"))
    expect(page.locator("#plot-generated-summary")).to_contain_text(re.compile("and [1-9]"))
    expect(speed).to_have_attribute("aria-valuetext", re.compile("generated"))


def test_a_failed_request_is_shown_with_its_reason(stage: Stage, open_page: Opener) -> None:
    stage.load.open()
    stage.step.open()
    refused = stage.ask(prompt="hello " * 3000)
    assert refused.status_code == 400
    page = opened(open_page(stage.server.url)[0])
    page.get_by_label("State of the requests").select_option("failed")
    row = page.locator("#requests tbody tr")
    expect(row).to_contain_text("Failed")
    row.click()
    details = page.get_by_role("dialog")
    expect(details.locator(".notice")).not_to_be_empty()
    expect(details).to_contain_text(refused.headers["x-request-id"])


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path, open_page: Opener) -> None:
    """The page shows what the server answered to the button."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    with running(Settings((str(tmp_path / "broken"),), port=0, load="use")) as server:
        page, watch = open_page(server.url)
        watch.expected = ["Failed to load resource"]
        opened(page)
        page.get_by_role("button", name="Load broken").click()
        expect(page.get_by_role("article")).to_contain_text("Failed")
        expect(page.get_by_role("article").locator(".notice")).to_contain_text("config.json")
        expect(page.get_by_role("button", name="Try again broken")).to_be_visible()


def test_the_key_is_asked_for_until_it_is_right(servable: Path, open_page: Opener) -> None:
    with running(Settings((str(servable),), port=0, load="use", api_keys=("right",))) as server:
        page, watch = open_page(server.url)
        watch.expected = ["401 (Unauthorized)"]
        page.goto("/dashboard")
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_role("button", name="Not now").click()
        expect(page.get_by_role("alert")).to_contain_text("This server asks for an API key.")
        page.get_by_role("button", name="Enter the key").click()
        dialog.get_by_label("Key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("This key is not valid.")
        dialog.get_by_label("Key", exact=True).fill("right")
        page.keyboard.press("Enter")
        expect(page.locator("#connection")).to_have_text("Live")
        expect(page.get_by_role("article")).to_contain_text("Not loaded")


@pytest.mark.skipif("MILLSTREAM_SCREENSHOTS" not in os.environ, reason="makes the picture for the docs")
def test_a_picture_of_a_busy_server(servable: Path, demo_path: Path, open_page: Opener) -> None:
    """Some minutes of requests to two models, so that the plots have something to show."""
    models = (ModelSpec(str(demo_path), name="smollm2-135m"), ModelSpec(str(servable), name="tiny-llama"))
    settings = Settings(models, port=0, max_batch=8, memory=4 * 10**9, isolation="thread")
    with running(settings) as server, ThreadPoolExecutor(3) as pool:
        done = threading.Event()
        talks = [pool.submit(talk, server, name, done) for name in ("smollm2-135m", "smollm2-135m", "tiny-llama")]
        try:
            page = opened(open_page(server.url, viewport={"width": 1280, "height": 1500})[0])
            page.wait_for_timeout(200_000)
            assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "flour " * 9000}).status_code == 400
            expect(page.locator("#requests tbody")).to_contain_text("Failed")
            screenshot(page, "page-dashboard")
        finally:
            done.set()
        for each in talks:
            each.result()


def talk(server: RunningServer, model: str, done: threading.Event) -> None:
    """Ask again and again, with pauses."""
    dice = random.Random(model)
    system = "You are a patient miller who explains how water becomes flour. "
    while not done.wait(dice.uniform(0, 4)):
        question = " ".join(dice.choices(["mill", "stream", "wheel", "stone", "flour", "river"], k=12))
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "max_tokens": dice.randint(8, 32)}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=SECONDS * 5)
        assert response.status_code == 200, response.text
