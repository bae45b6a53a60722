"""Build `Settings` from flags, the environment, the config file and the defaults, in this order of precedence."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from millstream.cli.api_keys import KEY_OPTIONS, collect_keys
from millstream.cli.config_file import ConfigFile, read_config, reject_duplicates
from millstream.cli.environment import (
    CONFIG_VARIABLE,
    MODELS_VARIABLE,
    default_config,
    models_in,
    read_environment,
    unknown_variables,
)
from millstream.cli.serve_options import OPTIONS
from millstream.config import NO_DRAFT, ModelSpec, Settings
from millstream.errors import ModelError
from millstream.logs import LogFormat
from millstream.models.source import name_of

Place = Literal["flag", "environment", "file", "default"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value is set."""

    place: Place
    where: str = ""
    """The flag, the variable, or the file with the line if it is known."""

    def __str__(self) -> str:
        return self.where or self.place


DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What is in force, and where it is set."""

    settings: Settings
    values: Mapping[str, Any]
    """By name of the option, as it was written: `Settings` may hold it in another form."""
    origins: Mapping[str, Origin]
    model_origins: tuple[Origin, ...]
    """Of `settings.specs`, in the same order."""
    file: ConfigFile
    warnings: tuple[str, ...] = ()

    @property
    def log_level(self) -> str:
        level: str = self.values["log_level"]
        return level

    @property
    def log_format(self) -> LogFormat:
        form: LogFormat = self.values["log_format"]
        return form


def settings_of(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Settings:
    return resolve_config(arguments, environment).settings


def resolve_config(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> ServeConfig:
    """`arguments` holds only the options that were given. Raises `ModelError` that says which value is wrong, where
    it is set and what is accepted."""
    file = _read_file(arguments, environment)
    given = {name: value for name, value in vars(arguments).items() if name in OPTIONS}
    flags = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    places: list[tuple[Place, dict[str, Any]]] = [
        ("flag", flags),
        ("environment", read_environment(environment)),
        ("file", dict(file.server)),
    ]
    _leave_keys_to_one_place(places)
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for name, option in OPTIONS.items():
        place = next((place for place, given in places if name in given), None)
        values[name] = option.default if place is None else dict(places)[place][name]
        origins[name] = DEFAULT if place is None else Origin(place, _where(place, name, file))
    fields: dict[str, Any] = {
        option.setting: option.to_field(values[name])
        for name, option in OPTIONS.items()
        if option.setting is not None and origins[name] is not DEFAULT
    }
    models, model_origins = _models(arguments, environment, file)
    settings = Settings(
        models=models,
        api_keys=_api_keys(values, origins, file),
        tool_servers=file.tool_servers,
        **fields,
    )
    reject_duplicates(_names(settings))
    warnings = (unknown_variables(environment), _spec_prefill_without_draft(settings))
    return ServeConfig(settings, values, origins, model_origins, file, tuple(each for each in warnings if each))


def _spec_prefill_without_draft(settings: Settings) -> str | None:
    """A sentence, if prompts of a model are to be read in part and no draft model would read them as a whole."""
    names = [
        spec.name or name_of(spec.source)
        for spec in settings.specs
        if (settings.spec_prefill if spec.spec_prefill is None else spec.spec_prefill) < 1
        and (spec.draft or settings.draft or NO_DRAFT) == NO_DRAFT
    ]
    if not names:
        return None
    return f"--spec-prefill does nothing for {', '.join(names)}: it needs a draft model. Name one with --draft MODEL"


def _read_file(arguments: argparse.Namespace, environment: Mapping[str, str]) -> ConfigFile:
    if arguments.no_config:
        if arguments.config is not None:
            raise ModelError("--config and --no-config contradict each other: leave one of them out")
        return ConfigFile()
    if arguments.config is not None:
        return read_config(arguments.config)
    if named := environment.get(CONFIG_VARIABLE, "").strip():
        try:
            return read_config(Path(named))
        except ModelError as error:
            raise ModelError(f"{error.message} (named by environment variable {CONFIG_VARIABLE})") from error
    usual = default_config(environment)
    return read_config(usual) if usual is not None and usual.is_file() else ConfigFile()


def _where(place: Place, name: str, file: ConfigFile) -> str:
    if place == "file":
        return file.place_of("server", name)
    return OPTIONS[name].flag if place == "flag" else OPTIONS[name].variable


def _leave_keys_to_one_place(places: list[tuple[Place, dict[str, Any]]]) -> None:
    """The first place that sets a key or a file of keys decides about all of them: a key of the file that was replaced
    by a flag must not stay valid."""
    decided = False
    for _, given in places:
        if decided:
            for name in KEY_OPTIONS:
                given.pop(name, None)
        decided = decided or any(name in given for name in KEY_OPTIONS)


def _api_keys(values: Mapping[str, Any], origins: Mapping[str, Origin], file: ConfigFile) -> tuple[str, ...]:
    given = {name: values[name] for name in KEY_OPTIONS if origins[name] is not DEFAULT}
    places = {"file": f"{file.path}: server.", "environment": "environment variable "}

    def where(name: str) -> str:
        origin = origins[name]
        return places[origin.place] + name if origin.place == "file" else places.get(origin.place, "") + origin.where

    return collect_keys(given, {name: where(name) for name in given})


def _models(
    arguments: argparse.Namespace, environment: Mapping[str, str], file: ConfigFile
) -> tuple[tuple[str | ModelSpec, ...], tuple[Origin, ...]]:
    """Models of the command line, or else of the environment, are served besides those of the file."""
    named, origin = tuple(arguments.models), Origin("flag", "command line")
    if not named:
        named, origin = models_in(environment), Origin("environment", MODELS_VARIABLE)
    origins = [origin] * len(named) + [
        Origin("file", file.place_of("models", model.name or "")) for model in file.models
    ]
    return (*named, *file.models), tuple(origins) or (DEFAULT,)


def _names(settings: Settings) -> Iterable[tuple[str, str]]:
    for spec in settings.specs:
        where = f"the model {spec.source or 'demo'}"
        yield spec.name or name_of(spec.source), where
        yield from ((alias, where) for alias in spec.aliases)
