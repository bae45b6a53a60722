"""The chat page as a person uses it."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from support.browser import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

DROP = """([type, name, data]) => {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const files = new DataTransfer();
    files.items.add(new File([bytes], name, {type}));
    const target = document.querySelector("#thread");
    for (const kind of ["dragover", "drop"])
        target.dispatchEvent(new DragEvent(kind, {dataTransfer: files, bubbles: true, cancelable: true}));
}"""
PASTE = DROP.replace("#thread", "#message").replace(
    """for (const kind of ["dragover", "drop"])
        target.dispatchEvent(new DragEvent(kind, {dataTransfer: files, bubbles: true, cancelable: true}));""",
    'target.dispatchEvent(new ClipboardEvent("paste", {clipboardData: files, bubbles: true, cancelable: true}));',
)

SAVED = """() => new Promise((resolve, reject) => {
    const opening = indexedDB.open("millstream");
    opening.onerror = () => reject(opening.error);
    opening.onsuccess = () => {
        const transaction = opening.result.transaction("conversations", "readwrite");
        transaction.objectStore("conversations").count();
        transaction.onabort = () => reject(transaction.error);
        transaction.oncomplete = () => resolve(opening.result.close());
    };
})"""


class ChatPage:
    def __init__(self, page: Page) -> None:
        self.page = page
        self.field = page.locator("#message")
        self.answers = page.locator(".message.assistant")
        self.questions = page.locator(".message.user")
        self.notice = page.locator("#notice")

    def open(self) -> ChatPage:
        """Waits until the models are known."""
        self.page.goto("/")
        self.page.locator("#model option").first.wait_for(state="attached")
        return self

    def reload(self) -> None:
        """Waits for what is being saved: this transaction comes behind all earlier ones."""
        self.page.evaluate(SAVED)
        self.page.reload()

    def ask(self, text: str) -> None:
        self.field.fill(text)
        self.field.press("Enter")

    def answer(self, number: int = -1) -> Locator:
        return self.answers.nth(number)

    def finished(self, count: int = 1) -> Locator:
        """Waits for `count` answers that are complete, and returns the last."""
        self.page.wait_for_function(
            """(count) => {
                const all = [...document.querySelectorAll(".message.assistant")];
                return all.length === count && all.every((each) => each.ariaBusy === "false");
            }""",
            arg=count,
            timeout=PATIENCE,
        )
        return self.answer()

    def text(self, number: int = -1) -> str:
        return self.answer(number).locator(":scope > .prose").inner_text().strip()

    def choose_model(self, name: str) -> None:
        self.page.get_by_label("Model", exact=True).select_option(name)

    def set(self, **fields: str) -> None:
        """Fills in the settings dialog; an underscore stands for a space."""
        self.page.get_by_role("button", name="Settings of this chat").click()
        dialog = self.page.get_by_role("dialog")
        dialog.get_by_text("More", exact=True).click()
        for name, value in fields.items():
            dialog.get_by_label(name.replace("_", " ")).fill(value)
        dialog.get_by_role("button", name="Save").click()
        dialog.wait_for(state="detached")

    def drop(self, data: bytes, *, type: str = "image/png", name: str = "picture.png", script: str = DROP) -> None:
        self.page.evaluate(script, [type, name, base64.b64encode(data).decode()])

    def paste(self, data: bytes, *, type: str = "image/png", name: str = "picture.png") -> None:
        self.drop(data, type=type, name=name, script=PASTE)
