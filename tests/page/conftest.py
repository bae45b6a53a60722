"""A real browser, watched: a test fails if its page logs anything or asks another host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

expect.set_options(timeout=60_000)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


class Watch:
    """What pages did that they should not. A test may allow messages that it brings about."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.hosts: set[str | None] = set()
        self.allowed: tuple[str, ...] = ()

    def see(self, context: BrowserContext) -> None:
        context.on("console", self._note)
        context.on("weberror", lambda error: self.messages.append(str(error.error)))
        context.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname))

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):  # others are hints of the browser
            self.messages.append(message.text)

    def check(self) -> None:
        assert [text for text in self.messages if not any(part in text for part in self.allowed)] == []
        assert self.hosts <= {"127.0.0.1"}


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def new_page(browser: Browser, watch: Watch) -> Iterator[Callable[..., Page]]:
    contexts: list[BrowserContext] = []

    def make(**options: object) -> Page:
        context = browser.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        watch.see(context)
        return context.new_page()

    yield make
    for context in contexts:
        context.close()
    watch.check()


@pytest.fixture(scope="session")
def axe() -> Callable[[Page], list[str]]:
    """Runs axe-core on a page and returns its serious and critical findings."""
    folder = os.environ.get("MILLSTREAM_NODE_PACKAGES", "")
    path = Path(folder) / "node_modules" / "axe-core" / "axe.min.js"
    if not path.is_file():
        pytest.skip("needs axe-core from npm, which `make test` installs")
    source = path.read_text()

    def check(page: Page) -> list[str]:
        page.evaluate(source)
        found = page.evaluate("axe.run()")["violations"]
        return [
            f"{each['id']}: {node['html'][:200]} {node['failureSummary']}"
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]

    return check


@pytest.fixture(scope="session")
def screenshot() -> Callable[[Page, str], None]:
    """Writes a picture of a page to the folder in MILLSTREAM_SCREENSHOTS, if that is set."""
    folder = os.environ.get("MILLSTREAM_SCREENSHOTS")

    def take(page: Page, name: str) -> None:
        if folder:
            page.screenshot(path=Path(folder) / f"{name}.png")

    return take
