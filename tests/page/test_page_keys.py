"""Pages of a server that asks for a key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from millstream.config import Settings
from support.browser import LAN_NAME, PATIENCE, Opener
from support.chat_page import ChatPage
from support.server import RunningServer, running

expect.set_options(timeout=PATIENCE)
KEY = "the-right-key"


@pytest.fixture(scope="module")
def locked(servable: Path) -> Iterator[RunningServer]:
    settings = Settings((str(servable),), port=0, api_keys=(KEY,), allowed_hosts=(LAN_NAME,), isolation="thread")
    with running(dataclasses.replace(settings, disabled=frozenset({"calibration"}))) as server:
        yield server


def test_a_wrong_key_then_the_right_one(open_page: Opener, locked: RunningServer) -> None:
    page, watch = open_page(locked.url)
    watch.expected.append("401")
    page.goto("/")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("asks for a key")
    dialog.get_by_label("Key").fill("wrong")
    dialog.get_by_label("Key").press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("not valid")
    dialog.get_by_label("Key").fill(KEY)
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog).to_have_count(0)

    chat = ChatPage(page)
    page.locator("#model option").first.wait_for(state="attached")
    chat.set(Maximum_length="5")
    chat.ask("hello")
    assert "Failed" not in chat.finished().inner_text()
    assert page.evaluate("[sessionStorage['millstream.key'], localStorage['millstream.key']]") == [KEY, None]
    page.reload()
    page.locator("#model option").first.wait_for(state="attached")
    expect(dialog).to_have_count(0)
    assert KEY not in page.content() and not [url for url in watch.requests if KEY in url]


def test_a_key_that_is_kept_and_one_that_is_not_given(open_page: Opener, locked: RunningServer) -> None:
    page, watch = open_page(locked.url)
    watch.expected.append("401")
    page.goto("/")
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Not now").click()
    notice = page.locator("#notice")
    expect(notice).to_contain_text("requires an API key")
    notice.get_by_role("button", name="Enter the key").click()
    dialog.get_by_label("Key").fill(KEY)
    dialog.get_by_label("Keep it in this browser").check()
    dialog.get_by_role("button", name="Use this key").click()
    page.locator("#model option").first.wait_for(state="attached")
    expect(notice).to_be_hidden()
    assert page.evaluate("localStorage['millstream.key']") == KEY


def test_a_name_of_the_local_network_without_https(open_page: Opener, locked: RunningServer) -> None:
    """Browsers give such a page fewer functions: no clipboard, no random ids."""
    page, watch = open_page(locked.url.replace("127.0.0.1", LAN_NAME))
    watch.expected.append("401")
    page.goto("/")
    page.get_by_role("dialog").get_by_label("Key").fill(KEY)
    page.get_by_role("button", name="Use this key").click()
    assert page.evaluate("[isSecureContext, location.hostname]") == [False, LAN_NAME]
    chat = ChatPage(page)
    page.locator("#model option").first.wait_for(state="attached")
    chat.set(Maximum_length="5")
    chat.ask("hello there")
    assert "Failed" not in chat.finished().inner_text()
    chat.questions.hover()
    chat.questions.get_by_role("button", name="Copy").click()
    expect(page.locator("#live")).to_have_text("Copied.")
    chat.field.fill("")
    chat.field.press("Control+V")
    expect(chat.field).to_have_value("hello there")


def test_the_reference_asks_for_the_key(open_page: Opener, locked: RunningServer) -> None:
    page, watch = open_page(locked.url)
    watch.expected.append("401")
    page.goto("/docs")
    page.get_by_role("dialog").get_by_label("Key").fill(KEY)
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_text("/v1/chat/completions")).to_be_visible()
