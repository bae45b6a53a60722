"""`millstream launch`: a fake agent reports what it was started with, by a real server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from millstream.cli import main
from millstream.cli.agents import AGENTS
from millstream.cli.served_models import ServedModel, choose
from millstream.errors import NotFound
from millstream.model_facts import ModelCard
from support.agent_stage import CARD, Player, playing

FAKE_AGENT = f"""\
#!{sys.executable} -IS
import json, os, sys
report = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid()}}
json.dump(report, open(os.environ["REPORT"], "w"))
sys.exit(7)
"""
KEY = "a-real-key"
Launch = Callable[..., int]


@pytest.fixture(scope="module")
def player() -> Player:
    return Player()


@pytest.fixture(scope="module")
def url(player: Player) -> Iterator[str]:
    with playing(player) as url:
        yield url


@pytest.fixture(scope="module")
def locked_url() -> Iterator[str]:
    with playing(Player(), api_keys=(KEY,)) as url:
        yield url


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return tmp_path / "report.json"


@pytest.fixture
def environment(tmp_path: Path, report: Path) -> Iterator[dict[str, str]]:
    """Fake agents are the only executables on PATH, and the home must stay empty."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    for agent in AGENTS.values():
        path = tmp_path / "bin" / agent.command
        path.write_text(FAKE_AGENT)
        path.chmod(0o755)
    yield {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home"), "REPORT": str(report)}
    assert not list((tmp_path / "home").iterdir()), "launch wrote into the user's home"


@pytest.fixture
def launch(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Runs the command in this process, which the agent must not replace: it becomes a child. Returns its status."""

    def execve(path: str, arguments: list[str], environment: dict[str, str]) -> NoReturn:
        child = subprocess.run(arguments, executable=path, env=environment, timeout=60, check=False)
        raise SystemExit(child.returncode)

    def run(*arguments: str, **more: str) -> int:
        for name in ("MILLSTREAM_URL", "MILLSTREAM_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in (environment | more).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(os, "execve", execve)
        try:
            return main(["launch", *arguments])
        except SystemExit as end:
            assert isinstance(end.code, int)
            return end.code

    return run


def started(report: Path) -> tuple[list[str], dict[str, str]]:
    found = json.loads(report.read_text())
    return found["arguments"], found["environment"]


def test_claude_gets_the_server_the_model_and_its_limits(launch: Launch, report: Path, url: str) -> None:
    status = launch(
        "claude", "--url", url, "--", "-p", "Hello", "--print", ANTHROPIC_API_KEY="own", CLAUDE_CODE_USE_VERTEX="1"
    )
    assert status == 7
    arguments, environment = started(report)
    assert environment["ANTHROPIC_BASE_URL"] == url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "millstream"
    assert {environment[f"ANTHROPIC_{name}"] for name in ("MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_OPUS_MODEL")} == {
        "org/player"
    }
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "16384"
    assert "ANTHROPIC_API_KEY" not in environment, "the user's own key would have gone to this server"
    assert "CLAUDE_CODE_USE_VERTEX" not in environment
    assert arguments[0] == "--settings"
    assert arguments[2:] == ["-p", "Hello", "--print"]
    settings = json.loads(arguments[1])["env"]
    assert settings == {name: environment[name] for name in settings}


def test_codex_gets_a_provider_of_its_own(launch: Launch, report: Path, url: str) -> None:
    launch("codex", "--url", f"{url}/v1/", "--", "exec", "Hello")
    arguments, environment = started(report)
    assert environment["MILLSTREAM_API_KEY"] == "millstream"
    options = dict(option.split("=", 1) for option in arguments[1:-2:2])
    assert arguments[0:-2:2] == ["-c"] * len(options)
    assert arguments[-2:] == ["exec", "Hello"]
    assert json.loads(options["model"]) == "org/player"
    assert json.loads(options["model_providers.millstream.base_url"]) == f"{url}/v1"
    assert json.loads(options["model_providers.millstream.env_key"]) == "MILLSTREAM_API_KEY"
    assert options["model_context_window"] == "65536"


def test_opencode_gets_a_configuration_in_its_environment(launch: Launch, report: Path, url: str) -> None:
    launch("opencode", "--url", url)
    arguments, environment = started(report)
    content: dict[str, Any] = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    provider = content["provider"]["millstream"]
    assert arguments == []
    assert content["model"] == content["small_model"] == "millstream/org/player"
    assert provider["options"] == {"baseURL": f"{url}/v1", "apiKey": "{env:MILLSTREAM_API_KEY}"}
    assert provider["models"]["org/player"]["limit"] == {"context": 65536, "output": 16384}


@pytest.mark.parametrize(
    ("agent", "arguments", "variables"),
    [
        ("qwen", ["--auth-type", "openai"], {"OPENAI_MODEL": "org/player"}),
        ("aider", ["--model", "openai/org/player"], {"OPENAI_API_KEY": "millstream"}),
        ("goose", ["session"], {"GOOSE_MODEL": "org/player", "GOOSE_CONTEXT_LIMIT": "65536"}),
    ],
)
def test_agents_of_the_chat_api(
    launch: Launch, report: Path, url: str, agent: str, arguments: list[str], variables: dict[str, str]
) -> None:
    launch(agent, "--url", url)
    given, environment = started(report)
    assert given[: len(arguments)] == arguments
    assert variables.items() <= environment.items()
    assert any(value.startswith(url) for name, value in environment.items() if name.startswith("OPENAI_"))


def test_the_agent_replaces_the_command(environment: dict[str, str], report: Path, url: str) -> None:
    code = "import sys; from millstream.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "launch", "codex", "--url", url, "--", "exec"]
    path = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    child = subprocess.Popen(command, env=environment | path)
    assert child.wait(60) == 7
    assert json.loads(report.read_text())["pid"] == child.pid


def test_print_only_shows_what_a_shell_would_run(
    launch: Launch, environment: dict[str, str], report: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("claude", "--print", "--url", url, "--", "-p", "It's me") == 0
    assert not report.exists()
    subprocess.run(["/bin/sh", "-c", capsys.readouterr().out], env=environment, check=False)
    arguments, environment = started(report)
    assert arguments[2:] == ["-p", "It's me"]
    assert environment["ANTHROPIC_BASE_URL"] == url


@pytest.mark.parametrize("agent", AGENTS)
def test_a_key_reaches_the_agent_but_no_argument_and_no_terminal(
    agent: str, launch: Launch, report: Path, locked_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(agent, "--url", locked_url, "--api-key", KEY, "--print") == 0
    assert launch(agent, "--url", locked_url, "--api-key", KEY) == 7
    arguments, environment = started(report)
    assert KEY in environment.values()
    assert KEY not in " ".join(arguments)
    assert KEY not in "".join(capfd.readouterr())


def test_url_and_key_may_come_from_the_environment(launch: Launch, locked_url: str) -> None:
    assert launch("codex", MILLSTREAM_URL=locked_url, MILLSTREAM_API_KEY=KEY) == 7


def test_a_server_with_keys_says_which_one_is_missing(locked_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "codex", "--url", locked_url, "--print"]) == 1
    assert "requires an API key: give it with --api-key or MILLSTREAM_API_KEY" in capsys.readouterr().err
    assert main(["launch", "codex", "--url", locked_url, "--api-key", "wrong", "--print"]) == 1
    assert "does not accept this API key" in capsys.readouterr().err


def test_no_server_no_agent_no_model(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        unused = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert main(["launch", "claude", "--url", unused]) == 1
    assert f"No server answers at {unused}" in (said := capsys.readouterr().err)
    assert "millstream serve MODEL" in said

    monkeypatch.setenv("PATH", "")
    assert main(["launch", "opencode", "--url", url]) == 1
    assert "'opencode' is not on PATH. Install it with: npm install -g opencode-ai" in capsys.readouterr().err

    assert main(["launch", "claude", "--url", url, "--model", "other"]) == 1
    assert "The server has no model 'other'. Its models: org/player." in capsys.readouterr().err


def test_the_model_is_a_loaded_one_that_knows_tools() -> None:
    models = [
        ServedModel("failed", "failed"),
        ServedModel("idle", "unloaded", capabilities=("completion", "tools")),
        ServedModel("plain", "ready", capabilities=("completion",)),
        ServedModel("able", "ready", ("alias",), capabilities=("completion", "tools")),
    ]
    assert choose(models, None).name == "able"
    assert choose(models[:3], None).name == "plain"
    assert choose(models[:2], None).name == "idle"
    assert choose(models, "alias").name == "able"
    with pytest.raises(NotFound, match="no model that works"):
        choose(models[:1], None)


@pytest.mark.parametrize(
    ("card", "warning"),
    [
        (ModelCard("m", 1, "unloaded"), "m is not loaded"),
        (ModelCard("m", 1, "ready", capabilities=("completion",)), "m knows no tools"),
        (
            ModelCard("m", 1, "ready", context_length=8192),
            "is 8192 tokens, and the prompt of claude alone takes about 18000",
        ),
        (CARD, ""),
    ],
)
def test_what_will_not_work_is_said_before_the_agent_starts(
    player: Player, url: str, card: ModelCard, warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    player.cards = [card]
    assert main(["launch", "claude", "--print", "--url", url]) == 0
    said = capsys.readouterr().err
    assert warning in said
    assert bool(said) == bool(warning)


@pytest.mark.parametrize("wrong", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:many"])
def test_a_url_that_is_none(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "claude", "--url", wrong])
    assert "is not the URL of a server: use http://127.0.0.1:8000" in textwrap.dedent(capsys.readouterr().err)
