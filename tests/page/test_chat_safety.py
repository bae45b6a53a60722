"""What a model writes is shown, and never run: scripts, handlers, links, images of other hosts."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from support.browser import PATIENCE, Opener, Watch
from support.chat_page import ChatPage
from support.scripted_server import ScriptedServer

expect.set_options(timeout=PATIENCE)

HOSTILE = """Hello <script>window.ran = 1</script> <img src="x" onerror="window.ran = 2"> <b>bold</b>

<img src="https://evil.example/pixel.png" alt="a pixel">

![a remote picture](https://evil.example/picture.png)

<svg onload="window.ran = 3"><script>window.ran = 4</script></svg>
<iframe srcdoc="<script>parent.ran = 5</script>" src="https://evil.example/frame"></iframe>
<object data="https://evil.example/object"></object><embed src="https://evil.example/embed">
<link rel="stylesheet" href="https://evil.example/style.css">
<style>body { background: url(https://evil.example/b) }</style>
<video src="https://evil.example/video" autoplay></video> <audio src="https://evil.example/a" autoplay></audio>
<form action="https://evil.example/form"><input name="key"><button>send</button></form>
<base href="https://evil.example/"> <meta http-equiv="refresh" content="0;url=https://evil.example/">

[run](javascript:window.ran=6) [also](JaVaScRiPt:window.ran=7) [data](data:text/html,<script>window.ran=8</script>)
<a href="javascript:window.ran=9" onclick="window.ran = 10">raw</a>
[fine](https://example.org/page) [own](/v1/models) [own too](models)
<p style="background: url(https://evil.example/p)" onmouseover="window.ran = 11">styled</p>
<details open ontoggle="window.ran = 12"><summary>more</summary>hidden</details>
<math><mtext><mglyph><style><img src=x onerror="window.ran = 13"></style></mglyph></mtext></math>

$$\\href{javascript:window.ran=14}{x} \\includegraphics{https://evil.example/tex.png}$$

```html
<script>window.ran = 15</script>
```
"""


@pytest.fixture
def opened(open_page: Opener, scripted: ScriptedServer) -> tuple[Page, Watch]:
    return open_page(scripted.url)


def test_nothing_that_a_model_writes_runs(opened: tuple[Page, Watch], scripted: ScriptedServer) -> None:
    page, watch = opened
    chat = ChatPage(page).open()
    scripted.answer = HOSTILE
    chat.ask("<script>window.ran = 20</script><img src=x onerror='window.ran = 21'>")
    prose = chat.finished().locator(":scope > .prose")
    links = prose.locator("[href]").all()
    assert "https://example.org/page" in [link.get_attribute("href") for link in links]
    for link in links:
        assert urlsplit(link.get_attribute("href")).scheme in ("http", "https", "mailto")
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    for link in prose.locator("a:not([href])").all():
        link.click()
    page.get_by_role("link", name="Chat").hover()
    assert page.evaluate("window.ran") is None
    expect(prose.locator("b")).to_have_text("bold")
    banned = "script, iframe, object, embed, link, style, svg:not(.icon), video, audio, form, input, base, meta, img"
    assert [each.evaluate("(each) => each.outerHTML") for each in prose.locator(banned).all()] == []
    handlers = (
        "(root) => [...root.querySelectorAll('*')].flatMap((each) => [...each.attributes].map((one) => one.name))"
    )
    assert not [name for name in prose.evaluate(handlers) if name.startswith("on")]

    picture = prose.get_by_role("link", name="Image: a remote picture")
    assert picture.get_attribute("href") == "https://evil.example/picture.png"
    assert '<img src="x" onerror="window.ran = 2">' in prose.inner_text(), "HTML is shown as it was written"
    assert "<script>window.ran = 15</script>" in prose.locator("pre").inner_text()
    expect(prose.locator("b")).to_have_text("bold")
    assert "<script>window.ran = 20</script>" in chat.questions.inner_text()

    page.reload()
    expect(prose.locator("b")).to_have_text("bold")
    assert page.evaluate("window.ran") is None
    assert not [url for url in watch.requests if "evil.example" in url]


RICH = """Some *words*, `code` and a table:

| wheel | power |
|---|---:|
| undershot | 30 % |
| overshot | 85 % |

```python
def power(flow: float, head: float) -> float:
    return 0.85 * 1000 * 9.81 * flow * head
```

The power is $P = \\eta \\rho g Q h$, and

$$\\int_0^1 x^2 \\, dx = \\frac{1}{3}$$

\\[ \\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix} \\]

It costs $5 or $6. A broken formula: $\\frac{$.
"""


def test_reasoning_is_folded(opened: tuple[Page, Watch], scripted: ScriptedServer) -> None:
    chat = ChatPage(opened[0]).open()
    scripted.answer = "<think>First I **think** of water.</think>Water it is."
    chat.ask("What drives a mill?")
    answer = chat.finished()
    assert chat.text() == "Water it is."
    thoughts = answer.locator(".reasoning .prose")
    expect(thoughts).not_to_be_visible()
    answer.get_by_text("Reasoning", exact=True).click()
    expect(thoughts).to_have_text("First I think of water.")
    chat.ask("Are you sure?")
    chat.finished(2)
    assert "I **think** of water" not in scripted.prompts[-1], "reasoning of earlier answers is not sent again"
    chat.page.get_by_role("button", name="Settings of this chat").click()
    expect(chat.page.get_by_label("Reasoning effort")).to_be_visible()


def test_markdown_tables_code_and_formulas(opened: tuple[Page, Watch], scripted: ScriptedServer) -> None:
    page, _ = opened
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat = ChatPage(page).open()
    scripted.answer = RICH
    chat.ask("Explain.")
    prose = chat.finished().locator(":scope > .prose")
    expect(prose.locator("em")).to_have_text("words")
    expect(prose.locator("td").nth(3)).to_have_text("85 %")
    expect(prose.locator("td").nth(3)).to_have_css("text-align", "right")
    expect(prose.locator("math[display=block]")).to_have_count(2)
    expect(prose.locator("math")).to_have_count(3)
    expect(prose.locator("mfrac")).to_have_count(1)
    assert prose.locator("[data-formula-style]").count() == 0
    expect(prose).to_contain_text("It costs $5 or $6.")
    expect(prose.locator(".code-bar")).to_contain_text("python")
    prose.get_by_role("button", name="Copy the code").click()
    expect(page.locator("#live")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()").startswith("def power(flow")
