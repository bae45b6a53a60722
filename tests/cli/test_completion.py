"""Completion in real shells, and what may come next on a command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.cli import main, make_parser
from millstream.cli.completion import SHELLS, script
from millstream.cli.completion.candidates import FILES, candidates
from millstream.model_facts import ModelCard
from support.agent_stage import Player, playing
from support.terminal import Terminal

PATIENCE = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with playing(Player(cards=[ModelCard("org/player", 1, "ready", ("short",))])) as url:
        yield url


@pytest.fixture
def environment(url: str, tmp_path: Path) -> dict[str, str]:
    """With `millstream` on PATH, and a cache with one model."""
    (tmp_path / "hub" / "models--org--cached--model").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "millstream"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m millstream "$@"\n')
    command.chmod(0o755)
    for folder in ("config", "data", "work"):
        (tmp_path / folder).mkdir()
    return os.environ | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "MILLSTREAM_URL": url,
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
    }


@pytest.fixture
def complete(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "MILLSTREAM_URL"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.delenv("MILLSTREAM_API_KEY", raising=False)


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["se"], {"serve"}),
        (["--v"], {"--version"}),
        (["serve", "--kv-b"], {"--kv-bits"}),
        (["serve", "--isolation", ""], {"auto", "thread", "process"}),
        (["serve", "--isolation=th"], {"--isolation=thread"}),
        (["serve", "org/"], {"org/cached--model", FILES}),
        (["serve", "--port", ""], set()),
        (["serve", "--config", ""], {FILES}),
        (["chat", "o"], {"org/player", "org/cached--model", FILES}),
        (["chat", "sh"], {"short", FILES}),
        (["launch", "co"], {"codex"}),
        (["launch", "codex", "--model", "sh"], {"short", FILES}),
        (["completion", ""], set(SHELLS)),
        (["nonsense", "x"], set()),
    ],
)
def test_what_may_come_next(words: list[str], expected: set[str]) -> None:
    assert {value for value, _ in candidates(make_parser(), words)} == expected


@pytest.mark.usefixtures("complete")
def test_candidates_have_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["__complete", "do"]) == 0
    assert capsys.readouterr().out == "doctor\tcheck this machine and the installation\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_have_no_errors(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == script(shell)
    (tmp_path / "script").write_text(script(shell))
    _require(shell)
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=PATIENCE)


@pytest.fixture
def bash(environment: dict[str, str], tmp_path: Path) -> Iterator[Terminal]:
    start = tmp_path / "start"
    start.write_text("PS1='READY> '\nbind 'set show-all-if-ambiguous on'\nbind 'set enable-bracketed-paste off'\n")
    shell = shutil.which("bash")
    assert shell is not None
    opened = Terminal([shell, "--noprofile", "--rcfile", str(start), "-i"], environment | {"TERM": "xterm"}, 40, 100)
    try:
        opened.wait_for("READY> ")
        opened.send('eval "$(millstream completion bash)"; cd ~/work\r')
        opened.wait_for("READY> ")
        yield opened
    finally:
        opened.close()


def test_pressing_tab_in_bash(bash: Terminal) -> None:
    bash.send("millstream doc\t")
    bash.wait_for("millstream doctor ")
    bash.send("--js\t")
    bash.wait_for("--json ")
    bash.send("\x15millstream launch codex --model org/p\t")
    bash.wait_for("org/player ")
    bash.send("\x15millstream serve org/c\t")
    bash.wait_for("org/cached--model ")
    bash.send("\x15touch own.toml\rmillstream serve --config ow\t")
    bash.wait_for("--config own.toml ")
    bash.send("\x15millstream chat --m\t")
    for option in ("--max-tokens", "--min-p", "--model"):
        bash.wait_for(option)


def test_fish(environment: dict[str, str], tmp_path: Path) -> None:
    fish = _require("fish")
    (tmp_path / "script").write_text(script("fish"))

    def ask(line: str) -> dict[str, str]:
        code = f"source {tmp_path / 'script'}; complete -C '{line}'"
        command = [fish, "--no-config", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE, check=True)
        return dict(row.split("\t") if "\t" in row else (row, "") for row in done.stdout.splitlines())

    assert ask("millstream doc") == {"doctor": "check this machine and the installation"}
    assert ask("millstream chat sh")["short"] == "served"
    assert set(ask("millstream completion ")) == set(SHELLS)


def test_zsh(environment: dict[str, str], tmp_path: Path) -> None:
    zsh = _require("zsh")
    opened = Terminal([zsh, "-f", "-i"], environment | {"TERM": "xterm"}, 40, 100)
    try:
        opened.send("PS1='READY> '; autoload -U compinit; compinit -u -D; echo load''ed\r")
        opened.wait_for("loaded")
        opened.wait_for("READY> ")
        opened.send('eval "$(millstream completion zsh)"; echo do""ne\r')
        opened.wait_for("done")
        opened.wait_for("READY> ")
        opened.send("millstream launch codex --model sh\t")
        opened.wait_for("ort")
        opened.send("\x15millstream compl\t")
        opened.wait_for("etion")
        opened.send("z\t")
        opened.wait_for("sh")
    finally:
        opened.close()


def _require(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    return found
