"""Options of what the server tells about itself: log lines and traces."""

from __future__ import annotations

from millstream.cli.serve_options.option import Option
from millstream.cli.serve_options.values import SWITCH, choice
from millstream.logs import FORMATS

LOGS = (
    Option(
        "log_level",
        choice("debug", "info", "warning", "error"),
        "lowest level that is logged",
        setting=None,
        own_default="info",
    ),
    Option(
        "log_format",
        choice(*FORMATS),
        "text for people, or json: one object per line",
        setting=None,
        own_default="text",
    ),
    Option(
        "log_content",
        SWITCH,
        "write prompts and answers to the log, shortened; they may be private",
    ),
    Option(
        "otel",
        SWITCH,
        "export OpenTelemetry spans; needs the extra otel",
        default_text="if OTEL_EXPORTER_OTLP_ENDPOINT is set",
    ),
)
