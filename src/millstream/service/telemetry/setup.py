"""Decides whether spans are exported: the extra `otel` is installed, and an option or the environment asks for it."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from millstream.errors import ModelError
from millstream.service.journal import RequestRecord

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
INSTALL = "pip install 'millstream[otel]'"


class Telemetry(Protocol):
    """Listens to the journal until it is closed."""

    def ended(self, record: RequestRecord) -> None: ...

    async def close(self) -> None: ...


def is_installed() -> bool:
    return all(any(importlib.metadata.distributions(name=name)) for name in PACKAGES)


def open_telemetry(
    asked: bool, environment: Mapping[str, str], installed: Callable[[], bool] = is_installed
) -> Telemetry | None:
    """`asked`: by an option. Raises `ModelError` if it was asked for and the extra is missing; a variable of the
    environment is only mentioned in the log then, since other programs may be meant."""
    endpoint = next((environment[name] for name in ENDPOINTS if environment.get(name)), None)
    disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if (endpoint is None and not asked) or disabled or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    if not installed():
        if asked:
            raise ModelError(f"--otel needs the OpenTelemetry SDK. Install it: {INSTALL}")
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but no spans are exported. To export them: %s", INSTALL)
        return None
    from millstream.service.telemetry.spans import RequestSpans  # half a second, which most servers do without

    log.info("exporting OpenTelemetry spans to %s", endpoint or "http://localhost:4318")
    return RequestSpans()
