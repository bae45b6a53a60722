"""The tables of options in docs/configuration.md, made from the tables in the code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from millstream.cli.model_options import MODEL_OPTIONS, SAMPLING_OPTIONS
from millstream.cli.serve_options import GROUPS
from millstream.cli.serve_options.option import Option
from millstream.loading.reload_plan import LIVE_FIELDS

_SPECIAL = re.compile(r"[|<>*_`\[\]]")


def tables() -> dict[str, str]:
    """By the name of their place in the page."""
    return {
        "options": "\n\n".join(f"### {_title(group.title)}\n\n{_options(group.options)}" for group in GROUPS),
        "model options": _model_options(),
        "sampling": _table(
            ("Key", "Accepts", "Meaning"),
            ((_code(option.name), option.accepts, option.help) for option in SAMPLING_OPTIONS.values()),
        ),
    }


def _options(options: Sequence[Option]) -> str:
    rows = []
    for option in options:
        flag = _code(_flags(option)) if "flag" in option.places else "-"
        key = _code(option.name) if "file" in option.places else "-"
        meaning = _plain(option.help)
        rows.append(
            (flag, key, _code(option.variable), _plain(option.value.accepts), _plain(option.shown_default), meaning)
        )
    return _table(("Flag", "In the file", "Environment", "Accepts", "Default", "Meaning"), rows)


def _flags(option: Option) -> str:
    return f"{option.flag}, --no-{option.flag[2:]}" if option.value.is_switch else option.flag


def _model_options() -> str:
    live = LIVE_FIELDS | {"alias"}
    rows = (
        (
            _code(option.name),
            _plain(option.accepts),
            _plain(option.default_text),
            _plain(option.help),
            "at once" if option.name in live else "by a reload of the model",
        )
        for option in MODEL_OPTIONS.values()
    )
    return _table(("Key", "Accepts", "Default", "Meaning", "A change takes effect"), rows)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _title(text: str) -> str:
    return text[0].upper() + text[1:]


def _code(text: str) -> str:
    return f"`{text}`"


def _plain(text: str) -> str:
    """Text whose characters mean nothing to Markdown."""
    return _SPECIAL.sub(lambda found: "&lt;" if found[0] == "<" else f"\\{found[0]}", text)
