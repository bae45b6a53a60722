"""The dashboard in a real browser: on made-up figures for every state, and on a real server for what moves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from millstream.config import Settings
from support.dashboard_data import MadeUpServer, model, request
from support.server import RunningServer, running

PATIENCE = 60_000
expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(servable: Path) -> Iterator[RunningServer]:
    with running(Settings((str(servable),), port=0)) as server:
        yield server


@pytest.fixture
def made_up() -> MadeUpServer:
    """Three models: one busy, one loading, one failed."""
    server = MadeUpServer("qwen3-4b", "gemma-3-12b", "smollm2")
    server.models[0].update(active=5, waiting=2)
    server.models[1].update(state="loading", progress=0.43, isolation="process", pid=5151)
    server.models[2] = model("smollm2", state="failed", error="The weights are not complete.", thread=None, restarts=5)
    server.recent = [request(number) for number in range(1, 20)]
    server.recent[1].update(state="failed", error="The prompt is too long.", finish_reason=None)
    server.recent[2].update(state="cancelled", model="gemma-3-12b")
    running = request(0, "decode", total=None)
    running["phases"][-1]["end"] = None
    server.running = [running]
    return server


@pytest.fixture
def open_made_up(browser: Browser, server: RunningServer, made_up: MadeUpServer) -> Iterator[Callable[..., Page]]:
    """Opens the dashboard of a real server, whose figures are made up."""
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    def fulfil(route: Route) -> None:
        url = urlsplit(route.request.url)
        if url.path == "/v1/models" or url.path.startswith("/server/"):
            since = float(parse_qs(url.query).get("since", ["0"])[0])
            route.fulfill(json=made_up.answer(url.path, since))
        else:
            route.continue_()

    def open_page(**options: object) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        context.route("**/*", fulfil)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{server.url}/dashboard")
        expect(page.locator("#live")).to_have_text("Live")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def test_cards_tell_the_state_of_each_model(open_made_up: Callable[..., Page]) -> None:
    page = open_made_up()
    busy = page.get_by_role("article", name="qwen3-4b")
    expect(busy).to_contain_text("Ready")
    expect(busy).to_contain_text("Thread 140021")
    expect(busy).to_contain_text("5 of 16 running, 2 queued")
    expect(busy).to_contain_text("3.00 GB of 8.00 GB")
    expect(busy.locator(".speed dd")).to_have_text(re.compile(r"^\d"))
    expect(busy.locator(".first dd")).to_have_text(re.compile(r"^[\d.]+ (ms|s)$"))
    busy.get_by_text("Details").click()
    expect(busy).to_contain_text("33 % of the budget")
    loading = page.get_by_role("article", name="gemma-3-12b")
    expect(loading).to_contain_text("Loading 43 %")
    expect(loading).to_contain_text("Process 5151")
    expect(loading.get_by_role("progressbar")).to_have_js_property("value", 0.43)
    failed = page.get_by_role("article", name="smollm2")
    expect(failed).to_contain_text("The weights are not complete.")
    expect(failed.get_by_role("button")).to_have_text("Try again")


def test_a_busy_model_is_unloaded_only_after_a_question(open_made_up: Callable[..., Page]) -> None:
    page = open_made_up()
    page.get_by_role("button", name="Unload qwen3-4b").click()
    question = page.get_by_role("dialog", name="Unload qwen3-4b?")
    expect(question).to_contain_text("7 requests are still running.")
    sent: list[str] = []
    page.on("request", lambda each: sent.append(each.url) if each.method == "POST" else None)
    question.get_by_role("button", name="Cancel").click()
    expect(question).to_have_count(0)
    with page.expect_response("**/server/status"):
        pass  # a poll later, nothing was sent
    assert sent == []


def test_requests_are_filtered_and_explained(open_made_up: Callable[..., Page]) -> None:
    page = open_made_up()
    rows = page.locator("#requests tbody tr")
    expect(rows).to_have_count(12)
    page.get_by_role("button", name="Show all 20").click()
    expect(rows).to_have_count(20)
    expect(rows.first).to_contain_text("Decode")
    page.get_by_label("Model of the requests").select_option("gemma-3-12b")
    expect(rows).to_have_count(1)
    page.get_by_label("Model of the requests").select_option("")
    page.get_by_label("State of the requests").select_option("failed")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("The prompt is too long.")
    rows.get_by_role("button").focus()
    page.keyboard.press("Enter")
    details = page.get_by_role("dialog", name="qwen3-4b")
    expect(details).to_contain_text("req_0002")
    expect(details).to_contain_text("Queued for200 ms")
    page.keyboard.press("Escape")
    expect(details).to_be_hidden()
    expect(rows.get_by_role("button")).to_be_focused()


def test_a_plot_is_read_with_the_keyboard(open_made_up: Callable[..., Page]) -> None:
    page = open_made_up()
    page.get_by_label("Model to plot").select_option("qwen3-4b")
    plot = page.get_by_role("slider", name="Time to first token")
    plot.focus()
    page.keyboard.press("Home")
    expect(plot).to_have_attribute("aria-valuenow", "0")
    expect(plot).to_have_attribute("aria-valuetext", re.compile(r"^\d\d:\d\d:\d\d: median .*, 99th percentile "))
    page.keyboard.press("ArrowRight")
    expect(plot).to_have_attribute("aria-valuenow", "1")
    assert page.locator("#plot-memory .moment").text_content() == page.locator("#plot-first .moment").text_content()
    page.keyboard.press("Escape")
    expect(page.locator("#plot-first .moment")).to_have_text("")
    expect(page.locator("#plot-first-summary")).to_contain_text("The last 5 min. median: between ")


def test_the_time_window_can_be_changed(open_made_up: Callable[..., Page]) -> None:
    page = open_made_up()
    plot = page.get_by_role("slider", name="Memory")
    expect(plot).to_have_attribute("aria-valuemax", re.compile("^(59|60)$"))
    page.get_by_label("1 h").check()
    expect(plot).to_have_attribute("aria-valuemax", re.compile("^7[12][0-9]$"))
    expect(page.locator("#plot-memory")).to_contain_text("1 h ago")
