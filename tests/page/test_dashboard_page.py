"""The dashboard in a real browser, on made-up figures: every state that a model and a request can be in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from millstream.config import Settings
from support.browser import PATIENCE, Opener, Watch, screenshot, scrolls_sideways, serious_findings
from support.dashboard_data import MadeUpServer, model, request
from support.server import RunningServer, running

expect.set_options(timeout=PATIENCE)
Open = Callable[..., tuple[Page, Watch]]
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def server(servable: Path) -> Iterator[RunningServer]:
    with running(Settings((str(servable),), port=0, load="use")) as server:
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
def open_made_up(open_page: Opener, server: RunningServer, made_up: MadeUpServer) -> Open:
    """Opens the dashboard of a real server, whose figures are made up."""

    def fulfil(route: Route) -> None:
        url = urlsplit(route.request.url)
        if url.path != "/v1/models" and not url.path.startswith("/server/"):
            route.continue_()
        elif made_up.is_down:
            route.abort()
        else:
            since = float(parse_qs(url.query).get("since", ["0"])[0])
            route.fulfill(json=made_up.answer(url.path, since))

    def opened(**options: object) -> tuple[Page, Watch]:
        page, watch = open_page(server.url, **options)
        page.route("**/*", fulfil)
        page.goto("/dashboard")
        expect(page.locator("#connection")).to_have_text("Live")
        return page, watch

    return opened


def test_cards_tell_the_state_of_each_model(open_made_up: Open) -> None:
    page, _ = open_made_up()
    busy = page.get_by_role("article", name="qwen3-4b")
    expect(busy).to_contain_text("Ready")
    expect(busy).to_contain_text("Thread 140021")
    expect(busy).to_contain_text("5 of 16 running, 2 queued")
    expect(busy).to_contain_text("3.00 GB of 8.00 GB")
    expect(busy.locator(".speed dd")).to_have_text(re.compile(r"^\d"))
    expect(busy.locator(".first dd")).to_have_text(re.compile(r"^[\d.]+ (ms|s)$"))
    busy.get_by_text("Details").click()
    expect(busy).to_contain_text("33 % of the budget")
    expect(busy).to_contain_text("grammar, prompt-lookup")
    expect(busy).to_contain_text("75 % of 400 tokens")
    loading = page.get_by_role("article", name="gemma-3-12b")
    expect(loading).to_contain_text("Loading 43 %")
    expect(loading).to_contain_text("Process 5151")
    expect(loading.get_by_role("progressbar")).to_have_js_property("value", 0.43)
    failed = page.get_by_role("article", name="smollm2")
    expect(failed).to_contain_text("The weights are not complete.")
    expect(failed.get_by_role("button")).to_have_text("Try again")


def test_a_busy_model_is_unloaded_only_after_a_question(open_made_up: Open) -> None:
    page, _ = open_made_up()
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


def test_requests_are_filtered_and_explained(open_made_up: Open) -> None:
    page, _ = open_made_up()
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
    expect(details).to_contain_text("60 of 80 tokens were right")
    page.keyboard.press("Escape")
    expect(details).to_be_hidden()
    expect(rows.get_by_role("button")).to_be_focused()


def test_a_plot_is_read_with_the_keyboard(open_made_up: Open) -> None:
    page, _ = open_made_up()
    page.get_by_label("Model to plot").select_option("qwen3-4b")
    plot = page.get_by_role("slider", name="Time to first token")
    plot.focus()
    page.keyboard.press("End")
    chosen = int(plot.get_attribute("aria-valuenow") or 0)
    expect(plot).to_have_attribute("aria-valuetext", re.compile(r"^\d\d:\d\d:\d\d: median .*, 99th percentile "))
    page.keyboard.press("ArrowLeft")
    expect(plot).to_have_attribute("aria-valuenow", str(chosen - 5))
    assert page.locator("#plot-memory .moment").text_content() == page.locator("#plot-first .moment").text_content()
    page.keyboard.press("Escape")
    expect(page.locator("#plot-first .moment")).to_have_text("")
    expect(page.locator("#plot-first-summary")).to_contain_text("The last 5 min. median: between ")


def shown_seconds(plot: Locator) -> int:
    return int(plot.get_attribute("aria-valuemax") or 0) - int(plot.get_attribute("aria-valuemin") or 0)


def test_the_time_window_can_be_changed(open_made_up: Open) -> None:
    page, _ = open_made_up()
    plot = page.get_by_role("slider", name="Memory")
    assert 280 <= shown_seconds(plot) <= 310
    page.get_by_label("1 h").check()
    expect(page.locator("#plot-memory")).to_contain_text("1 h ago")
    assert 3500 <= shown_seconds(plot) <= 3610


def test_a_server_that_is_gone_is_said_and_found_again(open_made_up: Open, made_up: MadeUpServer) -> None:
    page, watch = open_made_up()
    watch.expected = ["net::ERR_FAILED"]
    made_up.is_down = True
    trouble = page.get_by_role("alert")
    expect(trouble).to_contain_text("The server cannot be reached.")
    expect(trouble).to_contain_text(re.compile(r"Trying again in [4-8] s"))  # the pauses grow
    expect(page.locator("#connection")).to_have_text("Not live")
    made_up.is_down = False
    trouble.get_by_role("button", name="Try now").click()
    expect(page.locator("#connection")).to_have_text("Live")
    expect(trouble).to_be_hidden()


def test_a_hidden_page_asks_for_nothing(open_made_up: Open) -> None:
    page, _ = open_made_up()
    sent: list[str] = []
    page.evaluate(_SET_HIDDEN, True)
    expect(page.locator("#connection")).to_have_text("Paused")
    page.on("request", lambda each: sent.append(each.url))
    page.wait_for_timeout(2500)
    assert sent == []
    with page.expect_request("**/server/status"):
        page.evaluate(_SET_HIDDEN, False)
    expect(page.locator("#connection")).to_have_text("Live")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_keeps_people_out(scheme: str, open_made_up: Open) -> None:
    page, _ = open_made_up(color_scheme=scheme)
    page.get_by_role("article", name="qwen3-4b").get_by_text("Details").click()
    assert serious_findings(page) == []
    page.locator("#requests tbody tr").nth(2).click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert serious_findings(page) == []


def test_the_page_fits_a_phone(open_made_up: Open) -> None:
    page, _ = open_made_up(viewport=PHONE)
    assert not scrolls_sideways(page)
    page.get_by_role("button", name=re.compile("details of this request")).nth(1).click()
    expect(page.get_by_role("dialog")).to_contain_text("Request id")
    assert not scrolls_sideways(page)
    page.keyboard.press("Escape")
    screenshot(page, "page-dashboard-phone")


_SET_HIDDEN = """hidden => {
    Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
    document.dispatchEvent(new Event("visibilitychange"));
}"""
