"""The chat page with the demo model and a vision model, driven in Chromium."""

from __future__ import annotations

import io
import re
import time

import httpx
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from support.browser import PATIENCE, Opener
from support.chat_page import ChatPage
from support.server import RunningServer

expect.set_options(timeout=PATIENCE)
VISION = "tiny-vision"


@pytest.fixture
def page(open_page: Opener, page_server: RunningServer) -> Page:
    return open_page(page_server.url)[0]


@pytest.fixture
def chat(page: Page) -> ChatPage:
    return ChatPage(page).open()


def active(server: RunningServer) -> int:
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    return sum(model["active"] + model["waiting"] for model in models)


def wait_until_idle(page: Page, server: RunningServer) -> None:
    deadline = time.monotonic() + PATIENCE / 1000
    while active(server) and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    assert active(server) == 0


def picture() -> bytes:
    target = io.BytesIO()
    Image.new("RGB", (64, 48), (14, 100, 102)).save(target, "png")
    return target.getvalue()


def test_an_answer_streams_and_is_there_after_a_reload(chat: ChatPage) -> None:
    chat.set(Temperature="0", Maximum_length="40")
    chat.page.evaluate(
        """() => {
            window.lengths = new Set();
            new MutationObserver(() => {
                const text = document.querySelector(".message.assistant > .prose")?.textContent ?? "";
                if (text) window.lengths.add(text.length);
            }).observe(document.querySelector("#thread"), {childList: true, subtree: true, characterData: true});
        }"""
    )
    chat.ask("Tell me about the water wheel of a mill.")
    answer = chat.finished()
    assert chat.page.evaluate("window.lengths.size") > 3, "the answer came in one piece"
    assert chat.text() and "40 tokens" in answer.inner_text()
    assert "maximum length" in answer.inner_text()
    assert chat.field.input_value() == "" and chat.field.evaluate("(field) => field === document.activeElement")

    said = chat.text()
    chat.reload()
    expect(chat.questions).to_have_text(re.compile("water wheel"))
    assert chat.text() == said
    assert chat.page.locator("#conversations a").inner_text() == "Tell me about the water wheel of a mill."
    assert chat.page.title().startswith("Tell me about the water wheel")


@pytest.mark.parametrize("how", ["button", pytest.param("escape", marks=pytest.mark.whole)])
def test_stopping_frees_the_row(chat: ChatPage, page_server: RunningServer, how: str) -> None:
    chat.set(Temperature="0")
    chat.ask("Write a very long story about a miller, with many chapters.")
    expect(chat.answer().locator(":scope > .prose")).to_have_text(re.compile(r"\w"))
    if how == "button":
        chat.page.get_by_role("button", name="Stop").click()
    else:
        chat.page.keyboard.press("Escape")
    assert "You stopped this answer" in chat.finished().inner_text()
    wait_until_idle(chat.page, page_server)
    expect(chat.page.get_by_role("button", name="Send")).to_be_visible()


def test_a_page_that_is_closed_while_it_answers(chat: ChatPage, page_server: RunningServer) -> None:
    chat.set(Temperature="0")
    chat.ask("Write a very long story about a miller, with many chapters.")
    expect(chat.answer().locator(":scope > .prose")).to_have_text(re.compile(r"\w"))
    chat.page.reload()
    expect(chat.answer()).to_contain_text("The page was closed before this answer was complete")
    wait_until_idle(chat.page, page_server)
    chat.page.get_by_role("button", name="Try again").click()
    expect(chat.answer().locator(":scope > .prose")).to_have_text(re.compile(r"\w"))
    expect(chat.page.get_by_role("button", name="Stop")).to_be_visible()


def test_models_are_switched_and_an_image_is_dropped(chat: ChatPage) -> None:
    assert not chat.page.get_by_role("button", name="Add files").is_visible()
    chat.drop(picture())
    expect(chat.notice).to_contain_text("does not take images")

    chat.choose_model(VISION)
    expect(chat.page.locator("#model option:checked")).to_have_text("tiny-vision (loads when used)")
    expect(chat.page.get_by_role("button", name="Add files")).to_be_visible()
    chat.drop(picture(), name="teal.png")
    expect(chat.page.locator("#pending img")).to_have_attribute("alt", "teal.png")
    chat.paste(picture(), name="second.png")
    chat.page.get_by_role("button", name="Remove second.png").click()
    expect(chat.page.locator("#pending img")).to_have_count(1)
    chat.drop(b"words", type="text/plain", name="notes.txt")
    expect(chat.notice).to_contain_text("notes.txt is neither an image nor audio")

    with chat.page.expect_request("**/v1/chat/completions") as sent:
        chat.ask("What is this?")
    body = sent.value.post_data_json
    assert body["model"] == VISION
    kinds = [part["type"] for part in body["messages"][0]["content"]]
    assert kinds == ["image_url", "text"]
    assert body["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert "Failed" not in chat.finished().inner_text()
    assert chat.answer().locator(".who").inner_text() == VISION
    expect(chat.page.locator("#model option:checked")).to_have_text(VISION)

    chat.reload()
    image = chat.questions.locator("img")
    expect(image).to_have_attribute("alt", "teal.png")
    chat.page.wait_for_function("document.querySelector('.message.user img').naturalWidth === 64")
    expect(chat.page.locator("#model option:checked")).to_have_text(VISION)
