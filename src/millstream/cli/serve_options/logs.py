"""Options of the log."""

from __future__ import annotations

from millstream.cli.serve_options.option import Option
from millstream.cli.serve_options.values import choice

LOGS = (
    Option(
        "log_level",
        choice("debug", "info", "warning", "error"),
        "lowest level that is logged",
        setting=None,
        own_default="info",
    ),
)
