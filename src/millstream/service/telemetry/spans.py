"""Writes the record of each request as OpenTelemetry spans: one for the request, and one for each of its phases.

The attributes are those of the semantic conventions for generative AI. Spans are made when the request has ended, which
takes microseconds. A thread of the SDK exports them in batches from a bounded queue; if that is full, spans are lost,
and the event loop never waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from millstream import __version__
from millstream.service.journal import RequestRecord

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that the server's end waits for the last spans to be exported."""


class RequestSpans:
    """Listens to the journal."""

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        """`processor`: what to do with spans; None to export them as the variables OTEL_... say."""
        own = Resource({"service.name": "millstream", "service.version": __version__})
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("millstream", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, record: RequestRecord) -> None:
        parent = self._propagator.extract(record.context.trace)
        name = f"{record.operation} {record.model}" if record.served else record.operation
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=_nanoseconds(record, 0.0))
        if span.is_recording():
            _describe(span, record)
            inside = set_span_in_context(span)
            for phase in record.phases:
                child = self._tracer.start_span(phase.phase, inside, start_time=_nanoseconds(record, phase.start))
                child.end(_nanoseconds(record, phase.end))
        span.end(_nanoseconds(record, record.total))

    async def close(self, patience: float = PATIENCE) -> None:
        """Export what is left, on a thread: a collector that does not answer must not keep the server from ending."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> None:
            self._provider.shutdown()
            try:
                loop.call_soon_threadsafe(done.set)
            except RuntimeError:
                log.debug("the last spans were exported after the server had stopped")

        threading.Thread(target=work, name="otel-close", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), patience)
        except TimeoutError:
            log.warning("the OpenTelemetry collector does not answer: the last spans are lost")


def _nanoseconds(record: RequestRecord, offset: float | None) -> int:
    return int((record.started + (record.elapsed if offset is None else offset)) * 1e9)


def _describe(span: Span, record: RequestRecord) -> None:
    attributes: dict[str, str | int | float | list[str] | None] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "millstream",
        "gen_ai.request.model": record.requested or record.model,
        "gen_ai.response.model": record.model if record.served else None,
        "gen_ai.response.finish_reasons": record.finish_reason.split(", ") if record.finish_reason else None,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "url.path": record.context.endpoint,
        "millstream.request_id": record.request_id,
        "millstream.dialect": record.context.dialect,
        "millstream.outcome": record.outcome,
        "millstream.time_to_first_token": record.first_output,
    }
    failure = record.failure
    if failure is not None:
        attributes |= {"error.type": failure.code, "http.response.status_code": failure.status}
        if failure.status >= 500:
            span.set_status(Status(StatusCode.ERROR, failure.reason))
    span.set_attributes({name: value for name, value in attributes.items() if value is not None})
