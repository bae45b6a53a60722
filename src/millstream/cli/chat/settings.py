"""The settings of an answer that a chat can change: on the command line and by `/set`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from millstream.cli.parser import did_you_mean
from millstream.errors import BadRequest

_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Setting:
    """A parameter of `/v1/chat/completions`."""

    help: str
    read: Callable[[str], object]
    metavar: str = "X"


def _number(low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return read


def _integer(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return read


def _effort(text: str) -> str:
    if text not in EFFORTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(EFFORTS)}")
    return text


EFFORTS = ("none", "minimal", "low", "medium", "high")

SETTINGS = {
    "temperature": Setting("0 is the most likely answer; higher is more varied", _number(0, 2)),
    "top_p": Setting("choose among the most likely tokens up to this probability", _number(0, 1)),
    "top_k": Setting("choose among this many of the most likely tokens", _integer(0, _INT32), "N"),
    "min_p": Setting("leave out tokens below this share of the likeliest", _number(0, 1)),
    "repetition_penalty": Setting("above 1: repeats become less likely", _number(0.01, 10)),
    "max_tokens": Setting("most tokens of one answer", _integer(1, _INT32), "N"),
    "seed": Setting("the same seed gives the same answer", _integer(0, 2**63 - 1), "N"),
    "reasoning_effort": Setting(f"how long the model reasons: {', '.join(EFFORTS)}", _effort, "LEVEL"),
}


def read_setting(name: str, text: str) -> object:
    """Raises `BadRequest` with the values that are accepted."""
    name = name.lower().replace("-", "_")
    if name not in SETTINGS:
        hint = did_you_mean(name, SETTINGS)
        raise BadRequest(f"There is no setting {name!r}. {hint or 'Settings: ' + ', '.join(SETTINGS) + '.'}")
    try:
        return SETTINGS[name].read(text)
    except argparse.ArgumentTypeError as error:
        raise BadRequest(f"{name}: {error}.") from None


def add_setting_options(group: argparse._ArgumentGroup) -> None:
    for name, setting in SETTINGS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=name, type=setting.read, metavar=setting.metavar, help=setting.help)


def given_settings(arguments: argparse.Namespace) -> dict[str, object]:
    values = {name: getattr(arguments, name) for name in SETTINGS}
    return {name: value for name, value in values.items() if value is not None}
