"""The parts of a chat without a server: images in a text, Markdown as it arrives, conversations, arguments."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from millstream.cli.chat import markdown_stream
from millstream.cli.chat.conversation import Conversation
from millstream.cli.chat.images import Image, take_images
from millstream.cli.chat.markdown_stream import MarkdownStream, harmless, last_block, markdown
from millstream.cli.chat.prompt_line import is_open, without_quotes
from millstream.cli.chat.settings import EFFORTS, SETTINGS, read_setting
from millstream.cli.chat.slash import is_command
from millstream.cli.chat.target import Running, model_and_question, served
from millstream.cli.served_models import ServedModel
from millstream.cli.server_client import ServerClient
from millstream.errors import BadRequest, NotFound

ANSWER = """\
# Title

A paragraph with **bold** words
and a second line.

1. one
2. two

```python
print("not # a title")

# still code
```

| a | b |
|---|---|
| 1 | 2 |

The end."""


def rendered(text: str) -> str:
    console = Console(file=io.StringIO(), width=60, height=20, force_terminal=False)
    console.print(markdown(text))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@settings(max_examples=15)
@given(st.lists(st.integers(1, 60), max_size=40))
def test_markdown_that_arrives_in_pieces_looks_like_the_whole(sizes: list[int]) -> None:
    console = Console(file=io.StringIO(), width=60, height=20, force_terminal=False)
    stream, rest = MarkdownStream(console), ANSWER
    interval, markdown_stream.INTERVAL = markdown_stream.INTERVAL, 0.0
    try:
        for size in sizes:
            piece, rest = rest[:size], rest[size:]
            stream.feed(piece)
        stream.feed(rest)
        stream.end()
    finally:
        markdown_stream.INTERVAL = interval
    assert isinstance(console.file, io.StringIO)
    assert squeezed(console.file.getvalue()) == squeezed(rendered(ANSWER))


def squeezed(text: str) -> list[str]:
    """The lines without blank ones: their number may differ between blocks."""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_what_is_complete_is_before_the_last_block() -> None:
    assert last_block("one\n\ntwo") == len("one\n\n")
    assert last_block("```\none\n\ntwo") == 0
    assert last_block("one") == last_block("") == 0


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert harmless("a\x1b[2Jb\x07\x9bc\rd\n\te") == "a[2Jbcd\n\te"


def test_a_text_in_the_middle_of_html_is_shown() -> None:
    assert "<script>alert(1)</script>" in rendered("<script>alert(1)</script>")
    assert "https://example.com" in rendered("[a link](https://example.com)")


@pytest.mark.parametrize(
    ("text", "expected", "paths"),
    [
        ("look at {0}/a.png please", "look at a.png please", ["a.png"]),
        ("'{0}/b c.JPG' and \"{0}/b c.JPG\"", "b c.JPG and b c.JPG", ["b c.JPG", "b c.JPG"]),
        ("{0}/b\\ c.JPG?", "b c.JPG?", ["b c.JPG"]),
        ("no such file: {0}/z.png", "no such file: {0}/z.png", []),
        ("an a.pngx or {0}/a.png/x", "an a.pngx or {0}/a.png/x", []),
    ],
)
def test_paths_of_images_in_a_text(text: str, expected: str, paths: list[str], tmp_path: Path) -> None:
    for name in ("a.png", "b c.JPG"):
        (tmp_path / name).write_bytes(b"image")
    said, images = take_images(text.format(tmp_path))
    assert said == expected.format(tmp_path)
    assert [image.name for image in images] == paths
    assert all(image.url.startswith("data:image/") for image in images)


def test_a_conversation_is_saved_for_its_owner_only(tmp_path: Path) -> None:
    talk = Conversation("m", "Be kind.", {"temperature": 0.5})
    talk.ask("What is this?", [Image("a.png", "data:image/png;base64,AA==")])
    talk.answered("A picture.")
    file = tmp_path / "talk.json"
    talk.save(file)
    assert file.stat().st_mode & 0o077 == 0
    again = Conversation("other")
    again.restore(file)
    assert (again.model, again.system, again.settings) == ("other", "Be kind.", {"temperature": 0.5})
    assert again.body(stream=False)["messages"] == talk.body(stream=False)["messages"]
    assert again.drop_question() == "What is this?"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"format": "millstream-chat-1", "system": "", "settings": {}, "messages": [{}]}),
        "\x00",
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    talk = Conversation("m", "Be kind.")
    with pytest.raises(BadRequest, match="is not a conversation"):
        talk.restore(tmp_path / "file")
    assert talk == Conversation("m", "Be kind.")


def test_settings_are_those_of_the_api() -> None:
    from millstream.api.openai.schema import ChatRequest

    values = {"reasoning_effort": EFFORTS[0], "max_tokens": "5", "seed": "7", "top_k": "3"}
    body = {name: read_setting(name, values.get(name, "0.5")) for name in SETTINGS}
    parsed = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | body)
    assert (parsed.temperature, parsed.top_k, parsed.max_tokens) == (0.5, 3, 5)
    for name, wrong in (("temperature", "2.1"), ("top_p", "x"), ("top_k", "1.5"), ("seed", "-1")):
        with pytest.raises(BadRequest, match=f"{name}: .* is not a .*number from"):
            read_setting(name, wrong)


def test_triple_quotes() -> None:
    assert is_open('"""one')
    assert is_open('"""')
    assert not is_open('"""one\ntwo"""')
    assert not is_open('say """x')
    assert without_quotes('"""one\ntwo"""') == "one\ntwo"


def test_a_path_is_no_command(tmp_path: Path) -> None:
    assert is_command("/help")
    assert is_command("/hlep me")
    assert not is_command(f"{tmp_path}/a.png what is this?")
    assert not is_command("hello /help")


MODELS = Running(ServerClient("http://127.0.0.1:1"), [ServedModel("org/one", "ready", ("one",))])


@pytest.mark.parametrize(
    ("words", "piped", "expected"),
    [
        ([], False, (None, None)),
        (["one"], False, ("one", None)),
        (["one", "Why?"], False, ("one", "Why?")),
        (["org/unknown", "Why?"], False, ("org/unknown", "Why?")),
        (["demo"], False, ("demo", None)),
        (["Why is the sky blue?"], False, (None, "Why is the sky blue?")),
        (["summarise"], True, (None, "summarise")),
        (["one"], True, ("one", None)),
    ],
)
def test_the_model_is_told_from_the_question(
    words: list[str], piped: bool, expected: tuple[str | None, str | None]
) -> None:
    assert model_and_question(words, None, MODELS, piped=piped) == expected


def test_a_word_that_should_be_a_model() -> None:
    with pytest.raises(NotFound, match=r"There is no model 'onee'. Did you mean one"):
        model_and_question(["onee"], None, MODELS, piped=False)


def test_which_server_answers() -> None:
    one = MODELS.models[0]
    assert served(MODELS, None, explicit=False) == one
    assert served(MODELS, "one", explicit=True) == one
    assert served(MODELS, "org/other", explicit=False) is None, "a private server may have it"
    with pytest.raises(NotFound, match="The server has no model 'org/other'"):
        served(MODELS, "org/other", explicit=True)
