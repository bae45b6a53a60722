"""What all commands share: help that reads well, suggestions for misspelt words, versions, errors."""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from millstream import __version__
from millstream.cli import COMMANDS, main, make_parser

SOURCE = Path(__file__).parents[2] / "src"


def parsers() -> dict[str, argparse.ArgumentParser]:
    parser = make_parser()
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(actions[0].choices)


def test_every_command_is_registered_under_all_of_its_names() -> None:
    assert set(parsers()) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_describes_it_and_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = parsers()[name]
    assert parser.description, "what does it do?"
    assert parser.description.strip().endswith(".")
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    examples = re.split(r"^examples:\n", shown, flags=re.IGNORECASE | re.MULTILINE)[1]
    assert 2 <= len(re.findall(r"^ .*\bmillstream ", examples, re.MULTILINE)) <= 5
    for action in parser._actions:
        assert action.help, f"{action.dest} of {name} has no help"
    assert len(shown) < 12_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serv"], "There is no command 'serv'. Did you mean 'serve'?"),
        (["doktor"], "Did you mean 'doctor'?"),
        (["xyzzy"], "There is no command 'xyzzy'. See 'millstream --help'."),
        (["serve", "--prot", "9000"], "There is no option --prot. Did you mean '--port'?"),
        (["chat", "--temprature=1"], "There is no option --temprature. Did you mean '--temperature'?"),
        (["bench", "--api", "chta"], "There is no choice 'chta'. Did you mean 'chat'? Choose from chat, completions."),
        (["launch", "cladue"], "Did you mean 'claude'?"),
        (["launch", "--modle", "x"], "There is no option --modle. Did you mean '--model'?"),
        (["ps", "everything"], "What does 'everything' mean here?"),
    ],
)
def test_a_misspelt_word_gets_a_suggestion(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_words_may_follow_options() -> None:
    arguments = make_parser("chat").parse_args(["chat", "MODEL", "--temperature", "0", "Why?"])
    assert arguments.words == ["MODEL", "Why?"]


def test_alone_it_says_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    named = set(re.findall(r"millstream (\w+)", said))
    assert named >= {"serve", "chat", "doctor"}
    assert named <= set(COMMANDS)


def test_the_version_names_mlx_and_its_build(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(
        rf"millstream {__version__} \(MLX [\d.]+ for [\w ]+, Python [\d.]+\)\n", capsys.readouterr().out
    )


def test_bench_says_at_once_that_there_is_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        unused = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert main(["bench", unused]) == 1
    said = capsys.readouterr()
    assert f"No server answers at {unused}" in said.err
    assert "millstream serve MODEL" in said.err
    assert said.out == ""


def test_a_reader_that_has_enough_is_no_error() -> None:
    code = "import sys; from millstream.cli import main; sys.exit(main(['completion', 'bash']))"
    reading, writing = os.pipe()
    os.close(reading)
    child = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writing)
    assert child.stderr == ""


def test_commands_import_only_what_they_need() -> None:
    """`doctor` must run where packages are missing, and completion must be quick."""
    code = "import sys; from millstream.cli import make_parser; [make_parser(name) for name in sys.argv[1:]]"
    code += "; print([name for name in ('rich', 'numpy', 'uvicorn', 'prompt_toolkit') if name in sys.modules])"
    command = [sys.executable, "-c", code, "doctor", "completion", "chat", "launch"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
