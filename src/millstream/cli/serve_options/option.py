"""One option of `serve`: its name in each of the three places where it can be set, and what it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millstream.cli.serve_options.values import Value
from millstream.config import Settings

PREFIX = "MILLSTREAM_"
_DEFAULTS = Settings()


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    """The key in the file's table [server]. The variable is the same in capitals, after `MILLSTREAM_`."""
    value: Value
    help: str
    default_text: str | None = None
    """The default in words, where the value alone does not say it."""
    flag: str = ""
    """Default: `--` and the name with dashes. The flag of a list names one item."""
    setting: str | None = ""
    """The field of `Settings`; "": the one with the same name. None: none of its own."""
    to_field: Callable[[Any], Any] = field(default=_same, repr=False)
    own_default: Any = None
    """The default of an option that has no field of `Settings` of its own."""
    secret: bool = False
    """Its value is never shown."""
    places: frozenset[str] = frozenset({"flag", "environment", "file"})

    def __post_init__(self) -> None:
        if not self.flag:
            object.__setattr__(self, "flag", "--" + self.name.replace("_", "-"))
        if self.setting == "":
            object.__setattr__(self, "setting", self.name)

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def default(self) -> Any:
        return self.own_default if self.setting != self.name else getattr(_DEFAULTS, self.name)

    @property
    def shown_default(self) -> str:
        return self.default_text or self.value.show(self.default)

    @property
    def full_help(self) -> str:
        return f"{self.help} (default: {self.shown_default})"


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options of one topic, under one heading."""

    title: str
    options: tuple[Option, ...]
    essential: bool = False
    """What most people need: the short help shows it."""
