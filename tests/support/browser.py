"""A real Chromium that the tests of the pages drive, and what every page must keep to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

PATIENCE = 60_000
"""Milliseconds for anything that a page waits for."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LAN_NAME = "mill.test"
"""A name of this machine that is not a loopback name: browsers trust it as little as any other site without HTTPS."""
_OWN_SCHEMES = ("data", "blob", "about")


def chromium_path() -> str:
    """Returns the browser of this machine. Skips the test if there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("needs Chromium: on Debian, `apt-get install chromium`; elsewhere Chromium or Chrome on PATH")
    return found


@contextmanager
def launched() -> Iterator[Browser]:
    """While it is open, this thread counts as running an event loop: close it before tests that start their own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    path = chromium_path()
    arguments = ["--disable-dev-shm-usage", f"--host-resolver-rules=MAP {LAN_NAME} 127.0.0.1"]
    # A microphone that hums, and nobody who must be asked for it.
    arguments += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class Watch:
    """Notes what no page may do: errors in the console, and requests to other hosts."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.host = urlsplit(url).netloc
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.expected: list[str] = []
        """Parts of console errors that a test provokes, such as a 401."""
        context.on("request", lambda request: self._note_request(request.url))
        context.on("console", lambda message: self._note_console(message.type, message.text))
        context.on("weberror", lambda error: self.problems.append(f"uncaught: {error.error}"))

    def _note_request(self, url: str) -> None:
        self.requests.append(url)
        parts = urlsplit(url)
        if parts.scheme not in _OWN_SCHEMES and parts.netloc != self.host:
            self.problems.append(f"requested {url}")

    def _note_console(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(f"console {kind}: {text}")

    def check(self) -> None:
        left = [problem for problem in self.problems if not any(part in problem for part in self.expected)]
        assert not left, left


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[tuple[Page, Watch]]:
    """A fresh browser profile at `url`. After the test, nothing may have gone wrong in the page."""
    size = {"width": 1100, "height": 720}
    context = browser.new_context(**{"base_url": url, "viewport": size, "color_scheme": "light", **options})
    context.set_default_timeout(PATIENCE)
    watch = Watch(context, url)
    try:
        yield context.new_page(), watch
        watch.check()
    finally:
        context.close()


def serious_findings(page: Page) -> list[str]:
    """What axe finds wrong for people with disabilities, as far as it is serious or critical."""
    path = Path(os.environ.get("MILLSTREAM_NODE_PACKAGES", "")) / "node_modules" / "axe-core" / "axe.min.js"
    if not path.exists():
        pytest.skip("MILLSTREAM_NODE_PACKAGES names no folder with axe-core: `make test` installs it, where npm is")
    page.evaluate(path.read_text(encoding="utf-8"))
    found: dict[str, Any] = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {each['help']}: {node['html'][:200]} {node.get('failureSummary', '')[:200]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def scrolls_sideways(page: Page) -> bool:
    wide: bool = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    return wide


def screenshot(page: Page, name: str) -> None:
    """Writes NAME.png into the folder that MILLSTREAM_SCREENSHOTS names, with few colours to keep it small."""
    folder = os.environ.get("MILLSTREAM_SCREENSHOTS")
    if not folder:
        return
    import io

    from PIL import Image

    page.mouse.move(0, 0)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    Path(folder).mkdir(parents=True, exist_ok=True)
    image.quantize(96).save(Path(folder) / f"{name}.png", optimize=True)


Opener = Callable[..., tuple["Page", Watch]]
