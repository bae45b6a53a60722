"""Editing, retrying and branching, the list of conversations, settings and export: with a scripted model."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from support.browser import PATIENCE, Opener, Watch
from support.chat_page import ChatPage
from support.scripted_server import ScriptedServer

expect.set_options(timeout=PATIENCE)


@pytest.fixture
def opened(open_page: Opener, scripted: ScriptedServer) -> tuple[Page, Watch]:
    return open_page(scripted.url)


@pytest.fixture
def chat(opened: tuple[Page, Watch], scripted: ScriptedServer) -> ChatPage:
    """The model repeats the last message of the person, and counts its answers."""
    count = iter(range(1, 100))

    def echo(prompt: str) -> str:
        asked = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
        return f"Answer {next(count)} to: {asked[-1]}"

    scripted.answer = echo
    return ChatPage(opened[0]).open()


def test_edit_retry_and_branch(chat: ChatPage, scripted: ScriptedServer) -> None:
    chat.ask("first")
    chat.finished(1)
    chat.ask("second")
    chat.finished(2)
    assert chat.text() == "Answer 2 to: second"

    chat.answer(1).get_by_role("button", name="Try again").click()
    expect(chat.answer(1)).to_contain_text("Answer 3 to: second")
    chat.finished(2)
    expect(chat.answer(1).locator(".count")).to_have_text("2 / 2")

    chat.questions.first.hover()
    chat.questions.first.get_by_role("button", name="Edit").click()
    field = chat.page.get_by_label("Edit your message")
    assert field.input_value() == "first"
    field.fill("changed")
    field.press("Enter")
    expect(chat.answer()).to_contain_text("Answer 4 to: changed")
    chat.finished(1)
    assert "second" not in scripted.prompts[-1], "the branch holds messages of another one"

    chat.questions.first.get_by_role("button", name="Previous version").click()
    expect(chat.answers).to_have_count(2)
    assert (chat.text(0), chat.text(1)) == ("Answer 1 to: first", "Answer 3 to: second")
    chat.answer(1).get_by_role("button", name="Previous version").click()
    expect(chat.answer(1)).to_contain_text("Answer 2 to: second")

    expect(chat.answer(1).get_by_role("button", name="Next version")).to_be_focused()

    chat.reload()
    expect(chat.answers).to_have_count(2)
    assert chat.text(1) == "Answer 2 to: second", "the chosen branch is remembered"
    chat.ask("third")
    chat.finished(3)
    assert [part in scripted.prompts[-1] for part in ("Answer 1", "Answer 2", "Answer 3")] == [True, True, False]


def test_the_keyboard_alone(chat: ChatPage) -> None:
    page = chat.page
    page.keyboard.press("Tab")
    chat.field.focus()
    page.keyboard.type("one line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("another line")
    page.keyboard.press("Enter")
    chat.finished(1)
    expect(chat.questions.locator(".bubble")).to_have_text("one line\nanother line")
    page.keyboard.press("ArrowUp")
    field = page.get_by_label("Edit your message")
    expect(field).to_be_focused()
    page.keyboard.press("Escape")
    expect(field).to_have_count(0)
    expect(page.locator("#live")).to_have_text(re.compile("Answer: Answer 1 to: one line"))
    assert page.locator("#thread").get_attribute("aria-live") == "off"

    page.evaluate("document.activeElement.blur()")
    page.goto(page.url)
    page.keyboard.press("Tab")
    skip = page.get_by_text("Skip to the message field")
    skip.focus()
    page.keyboard.press("Enter")
    expect(chat.field).to_be_focused()


def test_conversations_are_listed_found_renamed_and_deleted(chat: ChatPage) -> None:
    page = chat.page
    links = page.locator("#conversations a")
    chat.ask("about rivers")
    chat.finished(1)
    page.get_by_role("button", name="New chat").click()
    expect(chat.answers).to_have_count(0)
    chat.ask("about mountains")
    chat.finished(1)
    expect(links).to_have_text(["about mountains", "about rivers"])

    page.get_by_label("Search conversations").fill("answer rivers")
    expect(links).to_have_text(["about rivers"])
    page.get_by_label("Search conversations").fill("nothing of the kind")
    expect(page.locator("#conversations")).to_contain_text("Nothing found")
    page.get_by_label("Search conversations").fill("")
    links.nth(1).click()
    expect(chat.questions).to_have_text(re.compile("about rivers"))

    page.get_by_role("button", name="Rename this chat").click()
    page.get_by_label("Title").fill("Water")
    page.get_by_role("button", name="Save").click()
    expect(links.nth(1)).to_have_text("Water")
    expect(page.locator("#title")).to_have_text("Water")

    page.get_by_role("button", name="Delete this chat").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(links).to_have_text(["about mountains"])
    expect(chat.answers).to_have_count(0)
    page.go_back()
    page.reload()
    expect(links).to_have_text(["about mountains"])


def test_settings_reach_the_server(chat: ChatPage, scripted: ScriptedServer) -> None:
    chat.set(System_prompt="Speak like a miller.", Temperature="0.5", Seed="7", Maximum_length="9", Top_p="0.9")
    with chat.page.expect_request("**/v1/chat/completions") as sent:
        chat.ask("hello")
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Speak like a miller."}
    assert {name: body[name] for name in ("temperature", "seed", "max_tokens", "top_p")} == {
        "temperature": 0.5,
        "seed": 7,
        "max_tokens": 9,
        "top_p": 0.9,
    }
    assert "top_k" not in body
    chat.finished(1)
    assert "Speak like a miller." in scripted.prompts[-1]
    chat.reload()
    chat.page.get_by_role("button", name="Settings of this chat").click()
    expect(chat.page.get_by_label("System prompt")).to_have_value("Speak like a miller.")
    chat.page.keyboard.press("Escape")
    expect(chat.page.get_by_role("dialog")).to_have_count(0)


def test_export(chat: ChatPage, tmp_path: Path) -> None:
    chat.ask("first")
    chat.finished(1)
    chat.answer().get_by_role("button", name="Try again").click()
    expect(chat.answer()).to_contain_text("Answer 2")
    chat.finished(1)
    saved = {}
    for kind in ("Markdown", "JSON"):
        chat.page.get_by_role("button", name="Export this chat").click()
        with chat.page.expect_download() as download:
            chat.page.get_by_role("button", name=kind).click()
        saved[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(saved[kind])
    assert saved["Markdown"].name == "first.md"
    assert saved["Markdown"].read_text() == "# first\n\n## You\n\nfirst\n\n## example-model\n\nAnswer 2 to: first\n"
    messages = json.loads(saved["JSON"].read_text())["messages"].values()
    assert sorted(message["text"] for message in messages) == ["Answer 1 to: first", "Answer 2 to: first", "first"]


def test_tool_calls_are_shown_and_answered(chat: ChatPage, scripted: ScriptedServer) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    chat.set(Tools=json.dumps([{"type": "function", "function": function}]))
    scripted.answer = lambda prompt: (
        "It rains."
        if "<|im_start|>tool" in prompt
        else '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    )
    chat.ask("How is the weather?")
    call = chat.finished(1).locator(".call")
    expect(call).to_contain_text("Calls weather")
    expect(call.locator("pre")).to_have_text('{\n  "city": "Bern"\n}')
    call.get_by_label("What the tool returned").fill("rain, 9 degrees")
    call.get_by_role("button", name="Send the result").click()
    chat.finished(2)
    assert chat.text() == "It rains."
    assert "rain, 9 degrees" in scripted.prompts[-1]
    chat.reload()
    expect(chat.page.locator(".message.tool")).to_contain_text("rain, 9 degrees")


def test_the_picker_shows_loads_and_failures(chat: ChatPage) -> None:
    state: dict[str, object] = {"state": "loading", "progress": 0.4, "phase": "reading weights"}

    def answer(route: Route) -> None:
        models = route.fetch().json()
        models["data"][0] |= state
        route.fulfill(json=models)

    chat.page.route("**/v1/models", answer)
    chat.reload()
    expect(chat.page.locator("#model-state")).to_have_text("Reading weights 40 %")
    expect(chat.page.get_by_role("progressbar")).to_have_attribute("value", "0.4")
    state.update(state="failed", progress=None, error="The file is broken.")
    expect(chat.page.locator("#model-state")).to_have_text("Failed: The file is broken.")
    expect(chat.page.get_by_role("progressbar")).to_have_count(0)
    expect(chat.page.locator("#model option")).to_have_text("example-model (failed)")


def test_audio_is_offered_where_the_model_takes_it(chat: ChatPage, opened: tuple[Page, Watch]) -> None:
    opened[1].expected += ["status of 400"]

    def listening(route: Route) -> None:
        models = route.fetch().json()
        models["data"][0]["capabilities"].append("audio")
        route.fulfill(json=models)

    chat.page.route("**/v1/models", listening)
    chat.reload()
    expect(chat.page.get_by_role("button", name="Add files")).to_be_visible()
    sound = {"name": "word.wav", "mimeType": "audio/wav", "buffer": b"RIFF....WAVE"}
    chat.page.locator("#file").set_input_files(sound)
    expect(chat.page.locator("#pending audio")).to_have_attribute("aria-label", "word.wav")
    chat.drop(b"x", name="picture.png")
    expect(chat.notice).to_contain_text("does not take images")
    chat.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": {"message": "No."}})
    )
    with chat.page.expect_request("**/v1/chat/completions") as sent:
        chat.ask("What do you hear?")
    part = sent.value.post_data_json["messages"][0]["content"][0]
    data = base64.b64encode(b"RIFF....WAVE").decode()
    assert part == {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    expect(chat.finished().locator(".notice.error")).to_have_text("No.")


def test_deleting_a_chat_that_is_being_answered(chat: ChatPage, scripted: ScriptedServer) -> None:
    scripted.answer = "word " * 700
    chat.ask("hello")
    expect(chat.page.get_by_role("button", name="Delete this chat")).to_be_visible()
    chat.page.get_by_role("button", name="Delete this chat").click()
    chat.page.get_by_role("button", name="Delete", exact=True).click()
    expect(chat.answers).to_have_count(0)
    chat.reload()
    expect(chat.page.locator("#conversations")).to_contain_text("Your conversations appear here")


def test_errors_are_words_with_what_to_do(chat: ChatPage, opened: tuple[Page, Watch]) -> None:
    opened[1].expected += ["net::ERR_FAILED", "status of 400"]
    chat.page.route("**/v1/chat/completions", lambda route: route.abort())
    chat.ask("hello")
    expect(chat.answer().locator(".notice.error")).to_contain_text("The server cannot be reached")
    chat.page.unroute("**/v1/chat/completions")
    chat.finished(1).get_by_role("button", name="Try again").click()
    expect(chat.answer()).to_contain_text("Answer 1 to: hello")
    chat.finished(1)
    chat.ask("x" * 5000)
    expect(chat.answer().locator(".notice.error")).to_contain_text("Start a new chat")
