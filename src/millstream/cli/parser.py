"""The parser of every command: help that reads well, and suggestions for misspelt commands, options and choices."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

Commands = argparse._SubParsersAction  # argparse has no public name for what `add_subparsers` returns
EXAMPLES = "Examples:"
_HELP_COLUMN = 30
_WIDTH = 100


class HelpFormatter(argparse.HelpFormatter):
    """Wraps prose, but leaves examples as they are."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **({"max_help_position": _HELP_COLUMN} | options))
        self._width = min(self._width, _WIDTH)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        prose, found, examples = text.partition(EXAMPLES)
        filled = super()._fill_text(prose, width, indent) if prose.strip() else ""
        return f"{filled}\n\n{found}{examples}".strip() if found else filled

    def _format_action(self, action: argparse.Action) -> str:
        """Commands are listed like options, without a line above them."""
        if isinstance(action, argparse._SubParsersAction):
            return "".join(self._format_action(command) for command in action._get_subactions())
        return super()._format_action(action)


class DefaultsHelpFormatter(HelpFormatter):
    """Adds each option's default to its help, where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default in ("", argparse.SUPPRESS):
            return action.help
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        return f"{action.help}; default: {shown.replace('%', '%%')}"


class Parser(argparse.ArgumentParser):
    """Commands that are added to it become parsers of the same class."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **({"formatter_class": HelpFormatter} | options))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Unknown arguments are rejected by the command that got them: it knows what they were meant to be."""
        if args is not None and self._subparsers is None and (option := self._misspelt(args)):
            self.error(self._unknown([option]))  # first: argparse would only complain of what is missing
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and not self._take_late(found, unknown):
            self.error(self._unknown(unknown))
        return found, []

    def _misspelt(self, words: Sequence[str]) -> str | None:
        """The first word that looks like an option and is none, not even the beginning of one."""
        for word in words:
            if word == "--":
                return None
            name = word.split("=", 1)[0]
            if (
                word.startswith("--")
                and " " not in word
                and not any(option.startswith(name) for option in self._option_string_actions)
            ):
                return word
        return None

    def _take_late(self, found: argparse.Namespace, words: Sequence[str]) -> bool:
        """Words after an option still belong to a positional argument that takes any number: `serve A --port 9000 B`.
        argparse would refuse them."""
        action = next((action for action in self._get_positional_actions() if action.nargs == "*"), None)
        if action is None or any(word.startswith("-") for word in words):
            return False
        setattr(found, action.dest, [*getattr(found, action.dest), *(self._get_value(action, word) for word in words)])
        return True

    def error(self, message: str) -> NoReturn:
        """The long usage stays in `--help`: here it would hide the message."""
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{end} See '{self.prog} --help'.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        kind = "command" if isinstance(action, argparse._SubParsersAction) else "choice"
        listed = f"Choose from {', '.join(choices)}" if kind == "choice" else ""
        text = f"There is no {kind} {value!r}. {did_you_mean(str(value), choices)} {listed}".strip()
        raise argparse.ArgumentError(None if kind == "command" else action, text)

    def _unknown(self, arguments: Sequence[str]) -> str:
        first = arguments[0]
        if not first.startswith("-"):
            return f"What does {first!r} mean here? Text with spaces needs quotes"
        name = first.split("=", 1)[0]
        return f"There is no option {name}. {did_you_mean(name, self._option_string_actions)}".strip()


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """A question with the nearest known word; empty if none is near."""
    near = nearest(wrong, known)
    return f"Did you mean {near[0]!r}?" if near else ""


def nearest(wrong: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The known words most like a misspelt one, best first. Upper and lower case count as alike."""
    folded = {word.lower(): word for word in known}
    return [folded[word] for word in difflib.get_close_matches(wrong.lower(), folded, n=count, cutoff=0.6)]


def examples(*lines: tuple[str, str]) -> str:
    """An epilog: each command line with what it does."""
    width = max(len(command) for command, _ in lines)
    return "\n".join([EXAMPLES, *(f"  {command:<{width}}  {does}".rstrip() for command, does in lines)])
