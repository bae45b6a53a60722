"""`llm`, a command line tool for models, with Millstream as one of its OpenAI-compatible models."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.types import ChatPrompt, Delta, FinishReason
from support.agent_stage import Player, calls_then_says, playing, tool_results

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm") is None, reason="llm is not installed")

FUNCTION = """
def weather(city: str) -> str:
    "The weather of a city."
    return f"7 degrees in {city}"
"""
Llm = Callable[..., str]


@pytest.fixture
def player() -> Player:
    return Player()


@pytest.fixture
def llm(tmp_path: Path, player: Player) -> Llm:
    def run(*arguments: str) -> str:
        with playing(player) as url:
            lines = [
                "- model_id: mill",
                "  model_name: org/player",
                f"  api_base: {url}/v1",
                "  supports_tools: true",
                "  supports_schema: true",
            ]
            (tmp_path / "extra-openai-models.yaml").write_text("\n".join(lines))
            done = subprocess.run(
                [sys.executable, "-P", "-m", "llm", "-m", "mill", "--key", "none", *arguments],
                env={**os.environ, "LLM_USER_PATH": str(tmp_path), "PYTHONWARNINGS": "ignore"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_a_tool_runs_and_a_conversation_goes_on(llm: Llm, player: Player) -> None:
    player.answer = calls_then_says("weather", {"city": "Oslo"}, "It is cold.")
    assert llm("What is the weather in Oslo?", "--functions", FUNCTION) == "It is cold."
    assert tool_results(player.requests[-1]) == ["7 degrees in Oslo"]
    assert llm("-c", "And tomorrow?", "--no-stream") == "It is cold."
    prompt = player.requests[-1].prompts[0]
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[-1]["content"] == "And tomorrow?"
    assert len(prompt.messages) == 5


def test_structured_output(llm: Llm, player: Player) -> None:
    player.answer = lambda request: [Delta(0, '{"name": "Oslo", "country": "Norway"}', finish_reason=FinishReason.STOP)]
    assert json.loads(llm("--schema", "name, country", "A city", "-s", "Answer briefly."))["name"] == "Oslo"
    grammar = player.requests[-1].grammar
    assert grammar is not None
    assert json.loads(grammar.source)["required"] == ["name", "country"]
