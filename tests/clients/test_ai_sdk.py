"""The AI SDK in Node: its providers for chat, Responses and Anthropic's API, each with a round trip through a tool.

Needs Node, and the packages of `package.json` beside this file in a folder that MILLSTREAM_NODE_PACKAGES names (the one
that has `node_modules`). `make test` installs them, where npm is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from millstream.types import CallDelta, Delta, FinishReason, GenerationRequest
from support.agent_stage import Player, calls_then_says, playing, tool_results

NODE = shutil.which("node")
FOLDER = os.environ.get("MILLSTREAM_NODE_PACKAGES", "")
SCRIPT = Path(__file__).parent / "ai_sdk.mjs"
PROVIDERS = ("chat", "compatible", "responses", "anthropic")

pytestmark = [
    pytest.mark.skipif(NODE is None, reason="Node is not on PATH"),
    pytest.mark.skipif(
        not (Path(FOLDER) / "node_modules" / "ai").exists() or not FOLDER,
        reason="MILLSTREAM_NODE_PACKAGES names no folder with the AI SDK's packages",
    ),
]


def drive(provider: str, mode: str, player: Player) -> dict[str, Any]:
    with playing(player) as url:
        assert NODE is not None
        done = subprocess.run(
            [NODE, str(SCRIPT), provider, mode, url],
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_tool_runs_once_and_its_result_comes_back(provider: str, mode: str) -> None:
    player = Player(calls_then_says("weather", {"city": "Oslo"}, "It is 7 degrees."))
    result = drive(provider, mode, player)
    assert result == {"text": "It is 7 degrees.", "steps": 2, "usage": 10, "runs": ["Oslo"]}
    first, second = player.requests
    assert tool_results(first) == []
    assert [json.loads(text) for text in tool_results(second)] == [{"celsius": 7}]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_object_of_a_schema(provider: str) -> None:
    """Each provider asks for it in its own way: by a schema, as JSON of any form, or by a tool that must be called."""

    def answer(request: GenerationRequest) -> Sequence[Delta]:
        assert request.grammar or (request.tools and request.tools.choice == "required")
        text = '{"city": "Oslo"}'
        if request.tools:
            call = CallDelta(0, "call_1", "json", text)
            return [Delta(0, calls=(call,), finish_reason=FinishReason.TOOL_CALLS)]
        return [Delta(0, text, finish_reason=FinishReason.STOP)]

    assert drive(provider, "structured", Player(answer))["object"] == {"city": "Oslo"}
