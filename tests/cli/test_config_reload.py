"""The configuration, read again while a server runs: its models, and what only a restart changes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from millstream.cli import serve
from millstream.cli.config_reload import Reread
from millstream.cli.settings import resolve_config
from millstream.config import ModelSpec
from millstream.errors import ModelError

X = '[models.x]\nsource = "org/x"\n'


def reread(*argv: str, environment: dict[str, str] | None = None) -> Reread:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["serve", *argv])
    return Reread(arguments, resolve_config(arguments, environment or {}), environment or {})


def test_models_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "mill.toml"
    file.write_text(X)
    again = reread("org/first", "--config", str(file), "--port", "1")
    assert again().models == ("org/first", ModelSpec("org/x", "x"))
    file.write_text('[server]\nport = 2\n[models.y]\nsource = "demo"\n')
    update = again()
    assert update.models == ("org/first", ModelSpec(None, "y"))
    assert update.needs_restart == (), "the flag --port stays in force"


def test_options_of_the_server_need_a_restart(tmp_path: Path) -> None:
    file, keys = tmp_path / "mill.toml", tmp_path / "keys"
    keys.write_text("one")
    file.write_text(f'[server]\napi_key_file = "keys"\nqueue = 3\n{X}')
    again = reread("--config", str(file))
    assert again().needs_restart == ()
    keys.write_text("two")
    assert again().needs_restart == ("api_keys",)
    file.write_text(f'[server]\npolicy = "fail-fast"\nlog_level = "debug"\n{X}[mcp.servers.files]\ncommand = "npx"\n')
    changed = again().needs_restart
    assert set(changed) == {"api_keys", "api_key_file", "queue", "policy", "log_level", "mcp.servers"}


def test_what_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mill.toml"
    file.write_text(X)
    again = reread("--config", str(file))
    for text, reason in [
        ("", "names no model any more"),
        ("[models.x", "not valid TOML"),
        (X + "pin = 1", "pin: 1 is"),
    ]:
        file.write_text(text)
        with pytest.raises(ModelError, match=reason):
            again()
    file.unlink()
    with pytest.raises(ModelError, match="cannot read"):
        again()


def test_a_file_without_models_may_stay_so(tmp_path: Path) -> None:
    file = tmp_path / "mill.toml"
    file.write_text("")
    again = reread("--config", str(file))
    assert again().models == ()
    file.write_text(X)
    assert again().models == (ModelSpec("org/x", "x"),)


def test_without_a_file_there_is_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config file to read again\. Start the server with --config"):
        reread("org/x")()
    again = reread("org/a", environment={"XDG_CONFIG_HOME": str(tmp_path), "APPDATA": str(tmp_path)})
    (tmp_path / "millstream").mkdir()
    (tmp_path / "millstream" / "config.toml").write_text(X)
    assert again().models == ("org/a", ModelSpec("org/x", "x")), "the usual file, which is new"
