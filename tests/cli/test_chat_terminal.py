"""`millstream chat` in a pseudo-terminal, against real servers."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from millstream.model_facts import ModelCard
from millstream.types import ChatPrompt, Delta, FinishReason, GenerationRequest
from support.agent_stage import Player, playing
from support.scripted_server import ScriptedServer, scripted_server
from support.terminal import ALT_ENTER, CTRL_C, CTRL_D, PATIENCE, UP, Terminal, terminal

PROMPT = ">>>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(tmp_path_factory.mktemp("chat") / "tiny") as subject:
        yield subject


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MILLSTREAM_", "NO_COLOR"))}
    return kept | {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}


@pytest.fixture
def chat(server: ScriptedServer, environment: dict[str, str]) -> Iterator[Terminal]:
    server.answer, server.delay = "Hello.", 0.0
    server.prompts.clear()
    with terminal("chat", "--url", server.url, "--temperature", "0", environment=environment) as opened:
        opened.wait_for("You talk to tiny")
        opened.wait_for(PROMPT)
        yield opened


def ask(chat: Terminal, text: str, answer: str) -> None:
    chat.send(f"{text}\r")
    chat.wait_for(answer)
    chat.wait_for(PROMPT)


def test_a_conversation_is_kept_and_markdown_is_rendered(chat: Terminal, server: ScriptedServer) -> None:
    server.answer = (
        "# A title\n\nSome **bold** words, <b>tags</b>\x1b]0;evil\x07.\n\n```python\nprint(1)\n```\n\nThe end."
    )
    ask(chat, "First question", "The end.")
    assert "**" not in chat.text
    assert "```" not in chat.text
    assert "<b>tags</b>" in chat.text, "HTML is text here"
    assert "\x1b]0;evil" not in chat.raw, "a model must not talk to the terminal"
    server.answer = "Second answer."
    ask(chat, "Second question", "Second answer.")
    first, second = server.prompts
    assert "First question" in first
    assert second.index("First question") < second.index("# A title") < second.index("Second question")
    chat.send(CTRL_D)
    assert chat.wait_exit() == 0


def test_several_lines_and_the_history_of_input(
    chat: Terminal, server: ScriptedServer, environment: dict[str, str]
) -> None:
    ask(chat, '"""one\rtwo"""', "Hello.")
    assert "one\ntwo<|im_end|>" in server.prompts[-1]
    ask(chat, f"three{ALT_ENTER}four", "Hello.")
    assert "three\nfour<|im_end|>" in server.prompts[-1]
    ask(chat, "the last one", "Hello.")
    chat.send(CTRL_D)
    assert chat.wait_exit() == 0
    history = Path(environment["XDG_STATE_HOME"], "millstream", "chat-history")
    assert history.stat().st_mode & 0o077 == 0
    with terminal("chat", "--url", server.url, environment=environment) as again:
        again.wait_for(PROMPT)
        ask(again, UP, "Hello.")
        assert "the last one<|im_end|>" in server.prompts[-1]


def test_ctrl_c_stops_the_answer_and_frees_the_row_and_twice_leaves(chat: Terminal, server: ScriptedServer) -> None:
    server.answer, server.delay = "word " * 3000, 0.05
    chat.send("Tell me a lot\r")
    chat.wait_for("word word")
    assert rows(server) == 1
    chat.send(CTRL_C)
    chat.wait_for("Stopped.")
    chat.wait_for(PROMPT)
    wait_until(lambda: rows(server) == 0)
    server.answer, server.delay = "Short.", 0.0
    ask(chat, "And now", "Short.")
    assert "word word" in server.prompts[-1], "what was said until then is part of the conversation"
    chat.send(CTRL_C)
    chat.wait_for("again to leave")
    chat.wait_for(PROMPT)
    chat.send(CTRL_C)
    assert chat.wait_exit() == 0


def test_commands(chat: Terminal, server: ScriptedServer, tmp_path: Path) -> None:
    ask(chat, "/hlep", "Did you mean '/help'?")
    ask(chat, "/help", "/retry")
    ask(chat, "/system Be a pirate.", "System prompt: Be a pirate.")
    ask(chat, "/set temperature 9", "not a number from 0 to 2")
    ask(chat, "/set temprature 1", "Did you mean 'temperature'?")
    ask(chat, "/set max_tokens 50", "max_tokens = 50")
    ask(chat, "/model", "* tiny")
    ask(chat, "/model tny", "Did you mean 'tiny'?")
    ask(chat, "/retry", "no question")
    ask(chat, "One", "Hello.")
    assert server.prompts[-1].startswith("<|im_start|>system\nBe a pirate.")
    server.answer = "Again."
    ask(chat, "/retry", "Again.")
    assert "Hello." not in server.prompts[-1]
    saved = tmp_path / "saved.json"
    ask(chat, f"/save {saved}", "Saved 2 messages")
    messages = json.loads(saved.read_text())["messages"]
    assert [message["content"] for message in messages] == ["One", "Again."]
    ask(chat, "/undo", "Forgotten: One")
    ask(chat, "/undo", "nothing to undo")
    ask(chat, f"/load {saved}", "Loaded 2 messages")
    ask(chat, "/load /nowhere.json", "cannot be read")
    ask(chat, "Two", "Again.")
    assert "One" in server.prompts[-1]
    ask(chat, "/clear", "is empty")
    ask(chat, "Three", "Again.")
    assert "One" not in server.prompts[-1]
    chat.send("/quit\r")
    assert chat.wait_exit() == 0


def test_reasoning_is_dimmed_and_images_go_along(environment: dict[str, str], tmp_path: Path) -> None:
    card = ModelCard("org/seer", 1, "ready", context_length=4096, capabilities=("completion", "vision", "thinking"))
    player = Player(_thinks, [card])
    Image.new("RGB", (4, 4), "red").save(tmp_path / "a b.png")
    with playing(player) as url, terminal("run", "--url", url, environment=environment) as chat:
        chat.wait_for(PROMPT)
        ask(chat, f"What is on '{tmp_path}/a b.png'?", "A red square.")
        assert "attached: a b.png" in chat.text
        assert "\x1b[2mLet me look." in chat.raw
        assert parts(player.requests[-1]) == ["image", "What is on a b.png?"]
        ask(chat, f"/image {tmp_path}/a b.png", "goes with your next question")
        ask(chat, "And here?", "A red square.")
        assert parts(player.requests[-1]) == ["image", "And here?"]
        ask(chat, "/image nothing.png", "cannot be read")


def test_one_question_in_a_terminal(server: ScriptedServer, environment: dict[str, str]) -> None:
    server.answer, server.delay = "Some **bold** words.", 0.0
    with terminal("chat", "--url", server.url, "tiny", "Why?", "--verbose", environment=environment) as screen:
        screen.wait_for("Some bold words.")
        screen.wait_for("tokens/s")
        assert screen.wait_exit() == 0
        assert "\x1b[1mbold" in screen.raw


def test_an_error_does_not_end_the_chat(environment: dict[str, str]) -> None:
    player = Player(_refuses)
    with playing(player) as url, terminal("chat", "--url", url, environment=environment) as chat:
        chat.wait_for(PROMPT)
        ask(chat, "Hello", "this one is refused")
        player.answer = lambda request: [Delta(0, "Fine.", finish_reason=FinishReason.STOP)]
        ask(chat, "Again", "Fine.")
        prompt = player.requests[-1].prompts[0]
        assert isinstance(prompt, ChatPrompt)
        assert [message["content"] for message in prompt.messages] == ["Again"]


def _thinks(request: GenerationRequest) -> list[Delta]:
    return [Delta(0, reasoning="Let me look."), Delta(0, "A red square.", finish_reason=FinishReason.STOP)]


def _refuses(request: GenerationRequest) -> list[Delta]:
    from millstream.errors import BadRequest

    raise BadRequest("this one is refused")


def parts(request: GenerationRequest) -> list[str]:
    """The parts of the latest message: the texts, and the kinds of others."""
    prompt = request.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    content: Any = prompt.messages[-1]["content"]
    return [part["text"] if part["type"] == "text" else part["type"] for part in content]


def rows(server: ScriptedServer) -> int:
    return int(httpx.get(f"{server.url}/v1/models").json()["data"][0]["active"])


def wait_until(condition: Any) -> None:
    waiting = threading.Event()
    for _ in range(PATIENCE * 10):
        if condition():
            return
        waiting.wait(0.1)
    raise AssertionError("it did not happen")
