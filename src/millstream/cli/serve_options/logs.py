"""Options of what the server tells about itself: log lines and traces."""

from __future__ import annotations

from millstream.cli.serve_options.common import Group, with_default
from millstream.logs import FORMATS


def add_logs(group: Group) -> None:
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help=with_default("lowest level that is logged", "info"),
    )
    group.add_argument(
        "--log-format",
        choices=FORMATS,
        default="text",
        help=with_default("text for people, or json: one object per line", "text"),
    )
    group.add_argument(
        "--log-content",
        action="store_true",
        help="write prompts and answers to the log, shortened; they may be private (default: never)",
    )
    group.add_argument(
        "--otel",
        action="store_true",
        help="export OpenTelemetry spans; needs the extra otel (default: if OTEL_EXPORTER_OTLP_ENDPOINT is set)",
    )
