"""How the pages look: accessibility in light and dark, phone width, screenshots; and the API reference."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from support.browser import PATIENCE, Opener, screenshot, scrolls_sideways, serious_findings
from support.chat_page import ChatPage
from support.scripted_server import ScriptedServer

expect.set_options(timeout=PATIENCE)
PHONE = {"viewport": {"width": 390, "height": 760}, "is_mobile": True, "has_touch": True}

QUESTION = "How much power does our water wheel give?"
ANSWER = """An overshot wheel turns 85 % of the water's energy into work. With 0.4 m³ per second and a fall of 3 m:

$$P = \\eta \\, \\rho \\, g \\, Q \\, h = 0.85 \\cdot 1000 \\cdot 9.81 \\cdot 0.4 \\cdot 3 \\approx 10 \\text{ kW}$$

| wheel | efficiency | power |
|---|---:|---:|
| undershot | 30 % | 3.5 kW |
| overshot | 85 % | 10.0 kW |

```python
def power(flow: float, head: float, efficiency: float = 0.85) -> float:
    return efficiency * 1000 * 9.81 * flow * head
```

That is enough for **a small mill and the house** beside it.
"""


def talk(page: Page, scripted: ScriptedServer) -> ChatPage:
    chat = ChatPage(page).open()
    scripted.answer = "A mill stream leads water to the wheel of a mill."
    chat.ask("What is a mill stream?")
    chat.finished(1)
    page.evaluate("location.hash = ''")
    expect(chat.answers).to_have_count(0)
    scripted.answer = ANSWER
    chat.ask(QUESTION)
    chat.finished(1)
    return chat


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_chat_has_no_serious_findings(open_page: Opener, scripted: ScriptedServer, theme: str) -> None:
    page, _ = open_page(scripted.url, color_scheme=theme, viewport={"width": 1100, "height": 780})
    chat = talk(page, scripted)
    page.evaluate(
        "document.querySelectorAll('.figures').forEach((each) => (each.hidden = true))"
    )  # those of a scripted model would mislead
    screenshot(page, "page-chat" if theme == "light" else "page-chat-dark")
    assert serious_findings(page) == []
    chat.questions.first.hover()
    chat.questions.first.get_by_role("button", name="Edit").click()
    page.get_by_role("button", name="Settings of this chat").click()
    page.get_by_text("More", exact=True).click()
    assert serious_findings(page) == []


def test_the_theme_is_switched_and_remembered(open_page: Opener, scripted: ScriptedServer) -> None:
    page, _ = open_page(scripted.url, color_scheme="light")
    ChatPage(page).open()
    shade = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(shade)
    page.get_by_role("button", name="Switch between light and dark").click()
    dark = page.evaluate(shade)
    assert light != dark
    page.reload()
    assert page.evaluate(shade) == dark
    page.goto("/docs")
    assert page.evaluate(shade) == dark


def test_chat_on_a_phone(open_page: Opener, scripted: ScriptedServer) -> None:
    page, _ = open_page(scripted.url, **PHONE)
    chat = talk(page, scripted)
    assert not scrolls_sideways(page)
    page.locator("#thread").evaluate("(thread) => (thread.scrollTop = 0)")
    screenshot(page, "page-phone")
    assert serious_findings(page) == []

    link = page.get_by_role("link", name="What is a mill stream?")
    expect(link).not_to_be_visible()
    page.get_by_role("button", name="Conversations").click()
    expect(page.get_by_label("Search conversations")).to_be_focused()
    assert not scrolls_sideways(page)
    link.click()
    expect(chat.answer()).to_contain_text("A mill stream leads water")
    expect(link).not_to_be_visible()
    page.get_by_role("button", name="Settings of this chat").click()
    assert not scrolls_sideways(page)


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.whole)])
def test_the_reference_shows_the_routes_and_tries_them(open_page: Opener, scripted: ScriptedServer, theme: str) -> None:
    page, _ = open_page(scripted.url, color_scheme=theme)
    page.goto("/docs")
    page.get_by_label("Find a route").fill("conversation v1/chat")
    route = page.locator("#chat_completions")
    expect(page.locator("details.operation:visible")).to_have_count(1)
    route.locator("summary").first.click()
    expect(route).to_contain_text("temperature")
    expect(route).to_contain_text("number, 0 to 2")
    if theme == "light":
        screenshot(page, "page-docs")
    route.get_by_role("button", name="Send").click()
    expect(route.locator(".output")).to_contain_text("Hello.")
    expect(route.get_by_text("Status 200")).to_be_visible()
    assert serious_findings(page) == []


def test_the_reference_on_a_phone(open_page: Opener, scripted: ScriptedServer) -> None:
    page, _ = open_page(scripted.url, **PHONE)
    page.goto("/docs#chat_completions")
    expect(page.locator("#chat_completions")).to_contain_text("temperature")
    assert not scrolls_sideways(page)
