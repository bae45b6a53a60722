"""Log lines, as text for people or as JSON for programs. Every line in the task of a request names the request.

A record may carry `fields`, a dictionary with what its message says, for JSON: `extra={"fields": {...}}`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from millstream.request_context import current_request

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)


class TextFormatter(logging.Formatter):
    """`19:01:29 I message`. The id of a request comes before its message, unless the message has it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        context = current_request()
        if context is not None and context.request_id not in record.message:
            record.message = f"{context.request_id} {record.message}"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, the id of the request, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (context := current_request()) is not None:
            line["request_id"] = context.request_id
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            line |= fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


_FORMATTERS: dict[LogFormat, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


def configure_logs(level: str | int, form: LogFormat) -> None:
    """Log to the standard error stream. Called once per process; does nothing if there are log handlers already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_FORMATTERS[form]())
    logging.basicConfig(level=level, handlers=[handler])


def log_format() -> LogFormat:
    """The format in use, for the processes that this one starts."""
    handlers = logging.getLogger().handlers
    return "json" if any(isinstance(handler.formatter, JsonFormatter) for handler in handlers) else "text"
