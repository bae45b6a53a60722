"""Real agents, started by `millstream launch`, complete a task of two steps: read a file, answer.

The server is real but for the model: it calls the agent's tool, and then tells what the tool returned. An agent runs if
its executable is on PATH or in a folder of MILLSTREAM_AGENTS, and offline, with a home folder of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from millstream.cli.agents import AGENTS
from millstream.types import ChatPrompt, Delta, GenerationRequest
from support.agent_stage import Answer, Player, calls_then_says, playing, tool_results

FOLDERS = os.environ.get("MILLSTREAM_AGENTS", "")
PATH = os.pathsep.join(filter(None, [FOLDERS, os.environ.get("PATH", "")]))
TASK = "Read note.txt and tell me the secret word."
WORD = "quern-4711"


@dataclasses.dataclass(frozen=True)
class Run:
    """How an agent runs without a terminal, its tool that reads a file, and a configuration that a user may have."""

    agent: str
    arguments: tuple[str, ...]
    tool: str
    parameter: str
    settings_file: str
    settings: str
    """They name another model or server."""
    value: str = "{folder}/note.txt"
    environment: tuple[tuple[str, str], ...] = ()


RUNS = [
    Run(
        "claude",
        ("-p", TASK, "--allowedTools", "Read"),
        *("Read", "file_path"),
        ".claude/settings.json",
        '{"env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "ANTHROPIC_MODEL": "other"}}',
    ),
    Run(
        "codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
        *("exec_command", "cmd"),
        ".codex/config.toml",
        'model = "other"\nmodel_context_window = 1000\n',
        value="cat note.txt",
    ),
    Run(
        "opencode",
        ("run", TASK),
        *("read", "filePath"),
        ".config/opencode/opencode.json",
        '{"model": "other/one"}',
        environment=(("OPENCODE_DISABLE_MODELS_FETCH", "1"),),
    ),
    Run("qwen", ("-p", TASK), "read_file", "file_path", ".qwen/settings.json", '{"model": {"name": "other"}}'),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.agent)
def test_an_agent_reads_a_file_and_answers(run: Run, tmp_path: Path) -> None:
    if shutil.which(AGENTS[run.agent].command, path=PATH) is None:
        pytest.skip(f"{run.agent} is not on PATH and not in a folder of MILLSTREAM_AGENTS")
    folder, home = tmp_path / "project", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    settings = home / run.settings_file
    settings.parent.mkdir(parents=True)
    settings.write_text(run.settings)
    (folder / "note.txt").write_text(f"The mill turns at noon. The secret word is {WORD}.\n")
    player = Player(_reads_then_tells(run, folder))
    with playing(player) as url:
        done = _launch(run, url, folder, home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"It says {WORD}." in done.stdout, done.stdout + done.stderr
    before, after = [request for request in player.requests if request.tools][-2:]
    assert tool_results(before) == []
    assert WORD in tool_results(after)[-1]
    assert _messages(after)[: len(_messages(before))] == _messages(before), "a turn changed what came before it"
    assert before.tools == after.tools
    assert {request.model for request in player.requests} == {player.cards[0].name}
    assert "other" in settings.read_text(), "the user's configuration was overwritten"


def _reads_then_tells(run: Run, folder: Path) -> Answer:
    arguments = {run.parameter: run.value.format(folder=folder)}

    def answer(request: GenerationRequest) -> Sequence[Delta]:
        found = re.search(r"quern-\d+", "".join(tool_results(request)))
        return calls_then_says(run.tool, arguments, f"It says {found[0] if found else 'nothing'}.")(request)

    return answer


def _launch(run: Run, url: str, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    environment = {"PATH": PATH, "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8", **kept, **dict(run.environment)}
    return subprocess.run(
        [sys.executable, "-m", "millstream", "launch", run.agent, "--url", url, "--", *run.arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _messages(request: GenerationRequest) -> list[str]:
    prompt = request.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    return [json.dumps(message, default=str, sort_keys=True) for message in prompt.messages]
