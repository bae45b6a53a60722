"""Asks a question in the server's page, in a real Chromium, and prints the answer. Needs Playwright and Chromium.

python scripts/ask_page.py http://127.0.0.1:8000
"""

from __future__ import annotations

import os
import shutil
import sys

PATIENCE = 180_000
QUESTION = "What is the capital of France?"
ANSWERED = """() => {
  const message = document.querySelector(".message.assistant");
  return message?.ariaBusy === "false" || message?.querySelector(":scope > .prose").innerText.length > 200;
}"""
"""The answer has ended, or is long: a small model may never come to an end."""


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def main() -> None:
    browser_path = chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        browser_path = None
    if browser_path is None:
        print("The page is not tried: Playwright or Chromium is missing.")
        return
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=sandbox)
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(sys.argv[1])
        page.locator("#model option").first.wait_for(state="attached")
        page.locator("#message").fill(QUESTION)
        page.locator("#message").press("Enter")
        page.wait_for_function(ANSWERED)
        answer = page.locator(".message.assistant > .prose").inner_text().strip()
        browser.close()
    if not answer:
        raise SystemExit("The page shows no answer.")
    print(f"In the page: {answer}")


if __name__ == "__main__":
    main()
