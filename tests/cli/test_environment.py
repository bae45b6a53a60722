"""Variables that are no options: the config file, the models, and those that nothing reads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from millstream.cli import main, serve
from millstream.cli.settings import ServeConfig, resolve_config
from millstream.config import ModelSpec
from millstream.errors import ModelError


def resolve(*argv: str, **environment: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return resolve_config(parser.parse_args(["serve", *argv]), environment)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with a config file in the usual place."""
    folder = tmp_path / "home" / ".config" / "millstream"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("[server]\nport = 1\n")
    return tmp_path / "home"


def test_the_usual_config_file_is_read_if_no_other_is_named(home: Path, tmp_path: Path) -> None:
    usual = home / ".config" / "millstream" / "config.toml"
    other = tmp_path / "other.toml"
    other.write_text("[server]\nport = 2\n")
    if sys.platform != "win32":
        found = resolve(HOME=str(home))
        assert (found.settings.port, found.file.path) == (1, usual)
        found = resolve(HOME=str(tmp_path), XDG_CONFIG_HOME=str(home / ".config"))
        assert (found.settings.port, found.file.path) == (1, usual)
    assert resolve(HOME=str(tmp_path)).file.path is None
    assert resolve(HOME=str(home), MILLSTREAM_CONFIG=str(other)).settings.port == 2
    assert resolve("--config", str(other), HOME=str(home)).settings.port == 2
    assert resolve("--config", str(usual), MILLSTREAM_CONFIG=str(other)).settings.port == 1
    assert resolve("--no-config", HOME=str(home), MILLSTREAM_CONFIG=str(other)).settings.port == 8000
    with pytest.raises(ModelError, match="--config and --no-config contradict"):
        resolve("--no-config", "--config", str(other))


def test_a_config_file_that_the_environment_names_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*none.toml: .* \(named by environment variable MILLSTREAM_CO"):
        resolve(MILLSTREAM_CONFIG=str(tmp_path / "none.toml"))


def test_models_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "mill.toml"
    file.write_text('[models.x]\nsource = "org/x"\n')
    config = resolve("--config", str(file), MILLSTREAM_MODELS="org/a, org/b,")
    assert config.settings.models == ("org/a", "org/b", ModelSpec("org/x", "x"))
    assert [str(origin) for origin in config.model_origins] == [*["MILLSTREAM_MODELS"] * 2, f"{file}:1"]
    config = resolve("org/c", MILLSTREAM_MODELS="org/a,org/b")
    assert config.settings.models == ("org/c",)
    assert [origin.place for origin in config.model_origins] == ["flag"]
    assert [origin.place for origin in resolve().model_origins] == ["default"]


def test_unknown_variables_get_one_warning_with_the_nearest_names() -> None:
    (warning,) = resolve(MILLSTREAM_PROT="1", MILLSTREAM_MAXBATCH="2", MILLSTREAM_QQQQQQ="3", OTHER="4").warnings
    assert "MILLSTREAM_PROT (did you mean MILLSTREAM_PORT?)" in warning
    assert "MILLSTREAM_MAXBATCH (did you mean MILLSTREAM_MAX_BATCH?)" in warning
    assert "MILLSTREAM_QQQQQQ" in warning and "OTHER" not in warning
    known = dict.fromkeys(["MILLSTREAM_URL", "MILLSTREAM_CACHE", "MILLSTREAM_CONFIG", "MILLSTREAM_MODELS"], "")
    assert resolve(MILLSTREAM_API_KEY="key", **known).warnings == ()


def test_reading_prompts_in_part_without_a_draft_model_gets_a_warning() -> None:
    (warning,) = resolve("some-folder", "--no-config", "--spec-prefill", "0.3").warnings
    assert "some-folder" in warning and "--draft" in warning
    assert resolve("some-folder", "--no-config", "--spec-prefill", "0.3", "--draft", "small").warnings == ()
    (warning,) = resolve("some-folder", "--no-config", "--spec-prefill", "0.3", "--draft", "none").warnings
    assert "does nothing" in warning


def test_the_command_reports_a_wrong_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_PORT", "eight")
    assert main(["serve", "--no-config"]) == 1
    expected = "millstream: environment variable MILLSTREAM_PORT: 'eight' is not an integer from 0 to 65535\n"
    assert capsys.readouterr().err == expected
