"""Build `Settings` from arguments, the config file and the environment. The command line overrides the file."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from millstream.cli.config_file import ConfigFile, read_config, reject_duplicates
from millstream.config import Settings
from millstream.errors import ModelError
from millstream.models.source import name_of

KEY_VARIABLE = "MILLSTREAM_API_KEY"

_FIELDS = {field.name for field in dataclasses.fields(Settings)}


def settings_of(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Settings:
    """`arguments` holds only the options that were given, named like the fields of `Settings`."""
    file = ConfigFile() if arguments.config is None else read_config(arguments.config)
    given = {name: value for name, value in vars(arguments).items() if name in _FIELDS}
    given |= {
        "models": (*arguments.models, *file.models),
        "fail_fast": arguments.policy == "fail-fast",
        "disabled": frozenset(arguments.disable),
        "api_keys": _api_keys(arguments, file, environment),
        "tool_servers": file.tool_servers,
    }
    if arguments.media_folder:
        given["media_folders"] = tuple(arguments.media_folder)
    if arguments.cors_origin:
        given["cors_origins"] = tuple(arguments.cors_origin)
    if arguments.allowed_host:
        given["allowed_hosts"] = tuple(arguments.allowed_host)
    from_file = {name: value for name, value in file.server.items() if name in _FIELDS}
    settings = Settings(**(from_file | given))
    reject_duplicates(_names(settings))
    return settings


def _names(settings: Settings) -> Iterable[tuple[str, str]]:
    for spec in settings.specs:
        where = f"the model {spec.source or 'demo'}"
        yield spec.name or name_of(spec.source), where
        yield from ((alias, where) for alias in spec.aliases)


def _api_keys(arguments: argparse.Namespace, file: ConfigFile, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Keys on the command line replace those of the file, so that an old key does not stay valid by accident. The key
    in the environment is accepted in addition."""
    if arguments.api_key or arguments.api_key_file:
        keys = [_checked(key, "--api-key") for key in arguments.api_key]
        key_file = arguments.api_key_file
    else:
        keys = [_checked(key, f"{arguments.config}: server.api_keys") for key in file.server.get("api_keys", ())]
        key_file = file.server.get("api_key_file")
    if key_file is not None:
        keys += _keys_in(key_file.expanduser())
    if KEY_VARIABLE in environment:
        keys.append(_checked(environment[KEY_VARIABLE], f"environment variable {KEY_VARIABLE}"))
    return tuple(dict.fromkeys(keys))


def _keys_in(file: Path) -> list[str]:
    """One key per line. Blank lines and lines that start with # are ignored."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except OSError as error:
        raise ModelError(f"cannot read the API keys in {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"cannot read the API keys in {file}: it is not UTF-8 text") from error
    keys = [_checked(line, str(file)) for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ModelError(f"{file} has no API key: write one per line")
    return keys


def _checked(key: str, where: str) -> str:
    """The key without surrounding whitespace, which a header cannot carry. Errors never repeat the key."""
    key = key.strip()
    if not key:
        raise ModelError(f"{where}: the API key is empty. Set a key, or leave the option out to serve without keys")
    if " " in key or not key.isprintable():
        raise ModelError(f"{where}: an API key contains a space or a character that is not printable")
    return key
