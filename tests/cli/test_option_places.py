"""Every option of `serve` in each place where it can be set: flags, environment, file, default, in this order."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millstream.cli import serve
from millstream.cli.serve_options import GROUPS, OPTIONS
from millstream.cli.serve_options.option import Option
from millstream.cli.settings import ServeConfig, resolve_config
from millstream.config import Settings
from millstream.errors import ModelError

TEXTS = {
    "host": ("::1", "0.0.0.0"),
    "cors_origins": ("http://one", "http://two"),
    "allowed_hosts": ("one.example", "two.example"),
    "api_keys": ("key-1", "key-2"),
    "draft": ("org/small", "org/smaller"),
    "spec_prefill": ("0.3", "0.5"),
    "spec_prefill_tokens": ("600", "700"),
}
BY_KIND = {
    "an integer": ("7", "8"),
    "a size": ("3GiB", "4MB"),
    "a time": ("90s", "2h"),
    "milliseconds": ("20", "30.5"),
}
WRONG = {"an integer": "some", "a size": "lots", "a time": "soon", "milliseconds": "0", "true or false": "perhaps"}
NUMBERS = ("an integer", "milliseconds", "a number")
IN_ALL_PLACES = [option for option in OPTIONS.values() if len(option.places) == 3]


@dataclass
class Given:
    """One value, as each place writes it."""

    option: Option
    text: str

    @property
    def flag(self) -> list[str]:
        if self.option.value.is_switch:
            return [self.option.flag if self.text == "yes" else self.option.flag.replace("--", "--no-", 1)]
        return [f"{self.option.flag}={self.text}"]

    @property
    def variable(self) -> dict[str, str]:
        return {self.option.variable: self.text}

    @property
    def toml(self) -> str:
        value = self.option.value
        written: Any = self.text
        if value.is_switch:
            written = self.text == "yes"
        elif value.accepts.startswith(("an integer", "milliseconds", "a number")) or isinstance(
            (value.choices or [""])[0], int
        ):
            written = float(self.text) if "." in self.text else int(self.text)
        return f"[server]\n{self.option.name} = {json.dumps([written] if value.is_list else written)}\n"

    def read(self, folder: Path) -> Any:
        """What every place should make of it; `folder` is that of the file."""
        value = self.option.value
        item = folder / self.text if value.is_path else value.text(self.text)
        return (item,) if value.is_list else item


def samples(option: Option) -> tuple[Given, Given]:
    value = option.value
    if option.name in TEXTS:
        texts = TEXTS[option.name]
    elif value.is_switch:
        texts = ("yes", "no")
    elif value.choices is not None:
        texts = (str(value.choices[0]), str(value.choices[-1]))
    elif value.is_path:
        texts = ("/one", "/two")
    else:
        texts = next(texts for kind, texts in BY_KIND.items() if value.accepts.startswith(kind))
    return Given(option, texts[0]), Given(option, texts[1])


def resolve(*argv: str, environment: dict[str, str] | None = None) -> ServeConfig:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return resolve_config(parser.parse_args(["serve", *argv]), environment or {})


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "mill.toml").write_text(text, encoding="utf-8")
        return str(tmp_path / "mill.toml")

    return write


def in_force(config: ServeConfig, option: Option) -> Any:
    """The value, and in the form of `Settings` as well."""
    value = config.values[option.name]
    if option.setting is not None:
        assert getattr(config.settings, option.setting) == option.to_field(value)
    return value


@pytest.mark.parametrize("option", IN_ALL_PLACES, ids=lambda option: option.name)
def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(
    option: Option, tmp_path: Path, write: Callable[[str], str]
) -> None:
    if option.name == "api_key_file":
        for name in ("/one", "/two"):
            (tmp_path / name[1:]).write_text("key")
        one, two = (Given(option, str(tmp_path / name)) for name in ("one", "two"))
    else:
        one, two = samples(option)
    config = resolve()
    assert (in_force(config, option), config.origins[option.name].place) == (option.default, "default")
    file = write("# a comment\n" + one.toml)
    config = resolve("--config", file)
    assert in_force(config, option) == one.read(tmp_path)
    assert str(config.origins[option.name]) == f"{file}:3"
    config = resolve("--config", file, environment=two.variable)
    assert in_force(config, option) == two.read(tmp_path)
    assert (config.origins[option.name].place, str(config.origins[option.name])) == ("environment", option.variable)
    config = resolve("--config", file, *one.flag, environment=two.variable)
    assert in_force(config, option) == one.read(tmp_path)
    assert (config.origins[option.name].place, str(config.origins[option.name])) == ("flag", option.flag)
    if not option.secret:
        empty = {option.variable: " "}
        assert resolve("--config", file, environment=empty).origins[option.name].place == "file"


def wrong_text(option: Option) -> str | None:
    """None if any text is right."""
    if option.value.choices is not None:
        return "no such choice"
    if option.name in ("cors_origins", "allowed_hosts"):
        return "%%"
    return next((text for kind, text in WRONG.items() if option.value.accepts.startswith(kind)), None)


@pytest.mark.parametrize("option", list(filter(wrong_text, IN_ALL_PLACES)), ids=lambda option: option.name)
def test_a_wrong_value_says_where_it_is_and_what_is_accepted(
    option: Option, write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    value, wrong = option.value, wrong_text(option)
    assert wrong is not None
    with pytest.raises(ModelError) as caught:
        resolve(environment={option.variable: wrong})
    assert caught.value.message.startswith(f"environment variable {option.variable}: {wrong!r} is not ")
    with pytest.raises(ModelError) as caught:
        resolve("--config", write(f"[server]\n{option.name} = {[wrong] if value.is_list else wrong!r}"))
    assert f"mill.toml: server.{option.name}: {wrong!r} is not " in caught.value.message
    if not value.is_switch:
        with pytest.raises(SystemExit):
            resolve(option.flag, wrong)
        assert f"argument {option.flag}: {wrong!r} is not " in capsys.readouterr().err


@pytest.mark.parametrize("option", list(OPTIONS.values()), ids=lambda option: option.name)
def test_what_is_shown_can_be_read_again(option: Option) -> None:
    if option.secret or option.name == "api_key_file":
        return
    for given in samples(option):
        read = given.read(Path("/"))
        item = read[0] if option.value.is_list else read
        assert option.value.text(option.value.show(read)) == item


def test_lists_in_the_environment_are_separated_by_commas() -> None:
    environment = {"MILLSTREAM_CORS_ORIGINS": "http://a, loopback,", "MILLSTREAM_DISABLE": "fuse,turn"}
    settings = resolve(environment=environment).settings
    assert settings.cors_origins == ("http://a", "loopback")
    assert settings.disabled == {"fuse", "mkl-layout"}


@pytest.mark.parametrize("text, value", [("1", True), ("TRUE", True), ("yes", True), ("0", False), ("off", False)])
def test_booleans_in_the_environment(text: str, value: bool) -> None:
    assert resolve(environment={"MILLSTREAM_ALLOW_PRIVATE_MEDIA": text}).settings.allow_private_media is value


def test_the_options_are_all_in_one_group_and_described() -> None:
    listed = [option.name for group in GROUPS for option in group.options]
    assert len(listed) == len(set(listed)) == len(OPTIONS)
    assert resolve().settings == Settings()
    for option in OPTIONS.values():
        assert option.help and option.shown_default not in ("", "None")
        assert option.flag == "--" + option.name.replace("_", "-").removesuffix("s" if option.value.is_list else "")
