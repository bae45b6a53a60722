"""Read the environment variables `MILLSTREAM_*`. An empty variable counts as not set, except that of a key."""

from __future__ import annotations

import difflib
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream.cli.serve_options import OPTIONS
from millstream.cli.serve_options.option import PREFIX
from millstream.errors import ModelError

CONFIG_VARIABLE = PREFIX + "CONFIG"
MODELS_VARIABLE = PREFIX + "MODELS"
_VARIABLES = {option.variable: option for option in OPTIONS.values() if "environment" in option.places}
_OTHERS = frozenset(PREFIX + name for name in ("URL", "CACHE", "NODE_PACKAGES", "KERNELS", "AGENTS", "SCREENSHOTS"))
"""Variables of other commands, of the cache folder, and of the tests."""


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that are set, by name. Raises `ModelError` with the variable and what is accepted."""
    values = {}
    for variable, option in _VARIABLES.items():
        text = environment.get(variable)
        if text is None or (not text.strip() and not option.secret):
            continue
        try:
            value = option.value.from_variable(text)
            # A list of keys that is empty by accident must not open the server: an empty key is an error later.
            values[option.name] = ("",) if option.secret and value == () else value
        except ArgumentTypeError as error:
            raise ModelError(f"environment variable {variable}: {error}") from error
    return values


def models_in(environment: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(item.strip() for item in environment.get(MODELS_VARIABLE, "").split(",") if item.strip())


def unknown_variables(environment: Mapping[str, str]) -> str | None:
    """A warning about variables that no option reads, each with the nearest one. None if there are none."""
    known = {*_VARIABLES, *_OTHERS, CONFIG_VARIABLE, MODELS_VARIABLE}
    unknown = sorted(name for name in environment if name.startswith(PREFIX) and name not in known)
    if not unknown:
        return None
    parts = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        parts.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return f"no option reads these environment variables, so they have no effect: {', '.join(parts)}"


def default_config(environment: Mapping[str, str]) -> Path | None:
    """The config file that is read if it exists and no other is named.

    The same on macOS as on Linux: command line tools there use ~/.config too, and the path has no space.
    """
    if folder := environment.get("APPDATA" if sys.platform == "win32" else "XDG_CONFIG_HOME"):
        return Path(folder) / "millstream" / "config.toml"
    home = environment.get("HOME")
    return Path(home) / ".config" / "millstream" / "config.toml" if home else None
